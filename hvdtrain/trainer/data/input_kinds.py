"""``shard_input``, which creates the ``ShardedInput`` for each kind of input."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.data.input_agreement import InputReport, agree
from hvdtrain.errors import DataError
from hvdtrain.private_api import keras_data
from hvdtrain.trainer.data.arrays import ShardedArrays
from hvdtrain.trainer.data.batch_stream import ShardedStream, stream_kind
from hvdtrain.trainer.data.pydataset import ShardedPyDataset
from hvdtrain.trainer.data.sharded_input import ShardedInput, ShardPlan

__all__ = ["shard_input"]


def shard_input(
    x: Any, y: Any = None, sample_weight: Any = None, *, plan: ShardPlan
) -> ShardedInput:
    """Return this rank's share of an input. All ranks must call this.

    Args:
        x: Arrays, a batched ``tf.data.Dataset``, a ``PyDataset``, a generator, a torch
            ``DataLoader`` or a Grain dataset.
        y: Targets, if ``x`` consists of arrays.
        sample_weight: Weights, if ``x`` consists of arrays.
        plan: How to divide the input.

    Raises:
        DataError: If the input can't be used, or differs between ranks. Every rank raises it.
        ValueError: If Keras doesn't accept this rank's input. If Keras accepts the input of other
            ranks, they raise a ``DataError``.
    """
    failure: Exception | None = None
    try:
        sharded = _create(x, y, sample_weight, plan)
        report = sharded.report()
    except Exception as error:
        # The other ranks are waiting for this rank's report, so send them the reason.
        failure, report = error, InputReport(error=f"{type(error).__name__}: {error}")
    try:
        steps = agree(plan.collectives, report, presharded=plan.presharded)
    except DataError:
        if failure is not None:
            raise failure from None
        raise
    sharded.set_steps(steps)
    return sharded


def _create(x: Any, y: Any, sample_weight: Any, plan: ShardPlan) -> ShardedInput:
    for name, least in (("batch_size", 1), ("steps", 1), ("seed", 0)):
        value = getattr(plan, name)
        if value is not None and (not hasattr(value, "__index__") or value < least):
            raise DataError(f"{name} must be an int of at least {least}, got {value!r}.")
    if keras_data.are_arrays(x, y, sample_weight):
        return _class_for_arrays()(x, y, sample_weight, plan)
    if keras_data.is_tf_dataset(x):
        from hvdtrain.trainer.data.tensorflow.tfdata import ShardedPipeline

        keras_data.check_no_targets("tf.data.Dataset", y, sample_weight)
        return ShardedPipeline(x, plan)
    if isinstance(x, keras.utils.PyDataset):
        keras_data.check_no_targets("PyDataset", y, sample_weight)
        return ShardedPyDataset(x, plan)
    if kind := stream_kind(x):
        keras_data.check_no_targets(kind, y, sample_weight)
        return ShardedStream(x, plan)
    if x is None:
        raise DataError("The input is missing, got x=None; pass arrays or a dataset.")
    raise DataError(
        f"The input has an unsupported type, got {type(x).__module__}.{type(x).__qualname__}; "
        "pass NumPy arrays, tensors, pandas or SciPy data (or nested dicts, lists and tuples of "
        "them), a batched tf.data.Dataset, a keras.utils.PyDataset, a generator, a torch "
        "DataLoader or a Grain dataset."
    )


def _class_for_arrays() -> type[ShardedArrays]:
    if keras.backend.backend() == "tensorflow":
        from hvdtrain.trainer.data.tensorflow.arrays import TensorflowArrays

        return TensorflowArrays
    return ShardedArrays
