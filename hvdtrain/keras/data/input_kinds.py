"""``shard_input``: finds the kind of an input, has the ranks compare it, and shares it out."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import DataError
from hvdtrain.keras.data import input_agreement
from hvdtrain.keras.data.arrays import ArraySource
from hvdtrain.keras.data.batch_stream import StreamSource, stream_kind
from hvdtrain.keras.data.pydataset import PyDatasetSource
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import ShardedInput, Source
from hvdtrain.keras.data.tfdata import TfDataSource
from hvdtrain.private_api import keras as private_keras

__all__ = ["shard_input"]


def shard_input(
    x: Any, y: Any = None, sample_weight: Any = None, *, plan: ShardPlan
) -> ShardedInput:
    """Make this rank's share of an input. Collective: every rank calls it.

    Args:
        x: The data: arrays, a batched ``tf.data.Dataset``, a ``PyDataset``, a generator, a torch
            ``DataLoader`` or a Grain dataset.
        y: Targets beside arrays.
        sample_weight: Weights beside arrays.
        plan: How to share it out.

    Raises:
        DataError: The input can't be shared out, or ranks passed different input. On every rank;
            where only some ranks can't use theirs, the others name them.
        ValueError: From Keras, for what it would refuse as well.
    """
    source: Source | None = None
    failure: Exception | None = None
    try:
        source = _source(x, y, sample_weight, plan)
        report = source.report()
    except Exception as error:
        # The others are about to wait for this rank's report: they get the reason instead.
        failure, report = error, InputReport(error=f"{type(error).__name__}: {error}")
    try:
        joint_steps = input_agreement.agree(plan.collectives, report, presharded=plan.presharded)
    except DataError:
        if failure is not None:
            raise failure from None
        raise
    assert source is not None  # without a source there is a failure, and it was raised
    return source.shard(joint_steps)


def _source(x: Any, y: Any, sample_weight: Any, plan: ShardPlan) -> Source:
    for name, least in (("batch_size", 1), ("steps", 1), ("seed", 0)):
        value = getattr(plan, name)
        if value is not None and (not hasattr(value, "__index__") or value < least):
            raise DataError(f"{name}={value!r} can't be used; expected an int of at least {least}.")
    if private_keras.are_arrays(x, y, sample_weight):
        return ArraySource(x, y, sample_weight, plan)
    if private_keras.is_tf_dataset(x):
        private_keras.refuse_extra("tf.data.Dataset", y, sample_weight)
        return TfDataSource(x, plan)
    if isinstance(x, keras.utils.PyDataset):
        private_keras.refuse_extra("PyDataset", y, sample_weight)
        return PyDatasetSource(x, plan)
    if kind := stream_kind(x):
        private_keras.refuse_extra(kind, y, sample_weight)
        return StreamSource(x, plan)
    if x is None:
        raise DataError("The input is missing, got x=None; pass arrays or a dataset.")
    raise DataError(
        f"The input has an unsupported type, got {type(x).__module__}.{type(x).__qualname__}; "
        "pass NumPy arrays, tensors, pandas or SciPy data (or nested dicts, lists and tuples of "
        "them), a batched tf.data.Dataset, a keras.utils.PyDataset, a generator, a torch "
        "DataLoader or a Grain dataset."
    )
