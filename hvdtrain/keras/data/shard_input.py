"""``shard_input``: finds the kind of an input, has the ranks compare it, and shares it out."""

from __future__ import annotations

import types
from typing import Any

import keras

from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import DataError
from hvdtrain.keras.data import input_agreement
from hvdtrain.keras.data.arrays import ArraySource
from hvdtrain.keras.data.generator import GeneratorSource
from hvdtrain.keras.data.partition import Shuffle
from hvdtrain.keras.data.pydataset import PyDatasetSource
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import ShardedInput, Source
from hvdtrain.keras.data.tfdata import TfDataSource
from hvdtrain.private_api import keras as private_keras

__all__ = ["shard_input"]


def shard_input(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: Shuffle = False,
    class_weight: Any = None,
    steps: int | None = None,
    rank: int,
    size: int,
    seed: int,
    collectives: Collectives,
    presharded: bool = False,
    trains: bool = False,
) -> ShardedInput:
    """Make this rank's share of an input. Collective: every rank calls it.

    Args:
        x: The data: arrays, a batched ``tf.data.Dataset``, or a ``PyDataset``; with
            ``presharded`` also a generator.
        y: Targets beside arrays.
        sample_weight: Weights beside arrays.
        batch_size: Rows per rank and step, for arrays; None for Keras' choice.
        shuffle: Whether each epoch has an order of its own; for arrays and PyDatasets.
            A ``tf.data.Dataset`` shuffles itself.
        class_weight: The weight of each class; the argument of ``fit``.
        steps: ``steps_per_epoch`` in ``fit``, ``steps`` in ``evaluate`` and ``predict``.
        rank: This rank.
        size: Number of ranks.
        seed: At least 0, the same on all ranks; with the epoch it determines every order.
        collectives: The ranks' connection.
        presharded: Every rank passes its own data, which is used whole. A rank that has fewer
            batches than others takes part in the rest of an epoch with rows = 0.
        trains: Whether ``Epochs`` reads it, which asks before each block of steps.

    Raises:
        DataError: The input can't be shared out, or ranks passed different input. On every rank;
            where only some ranks can't use theirs, the others name them.
        ValueError: From Keras, for what it would refuse as well.
    """
    source: Source | None = None
    failure: Exception | None = None
    try:
        plan = ShardPlan(
            rank=rank,
            size=size,
            seed=seed,
            steps=steps,
            presharded=presharded,
            collectives=collectives,
        )
        source = _source(x, y, sample_weight, batch_size, shuffle, class_weight, trains, plan)
        report = source.report()
    except Exception as error:
        # The others are about to wait for this rank's report: they get the reason instead.
        failure, report = error, InputReport(error=f"{type(error).__name__}: {error}")
    try:
        joint_steps = input_agreement.agree(collectives, report, presharded=presharded)
    except DataError:
        if failure is not None:
            raise failure from None
        raise
    assert source is not None  # without a source there is a failure, and it was raised
    return source.shard(joint_steps)


def _source(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: Any,
    shuffle: Any,
    class_weight: Any,
    trains: bool,
    plan: ShardPlan,
) -> Source:
    _check_numbers(batch_size, plan)
    if private_keras.are_arrays(x, y, sample_weight):
        return ArraySource(
            x,
            y,
            sample_weight,
            batch_size=batch_size or None,
            shuffle=shuffle,
            class_weight=class_weight,
            plan=plan,
        )
    if private_keras.is_tf_dataset(x):
        private_keras.refuse_extra("tf.data.Dataset", y, sample_weight)
        return TfDataSource(x, class_weight=class_weight, plan=plan)
    if isinstance(x, keras.utils.PyDataset):
        private_keras.refuse_extra("PyDataset", y, sample_weight)
        return PyDatasetSource(x, shuffle=bool(shuffle), class_weight=class_weight, plan=plan)
    if isinstance(x, types.GeneratorType) and plan.presharded:
        private_keras.refuse_extra("generator", y, sample_weight)
        return GeneratorSource(x, class_weight=class_weight, trains=trains, plan=plan)
    raise DataError(_refusal(x))


def _check_numbers(batch_size: Any, plan: ShardPlan) -> None:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("steps", plan.steps, 1),
        ("seed", plan.seed, 0),
    ):
        if value is not None and (not hasattr(value, "__index__") or value < least):
            raise DataError(f"{name}={value!r} can't be used; expected an int of at least {least}.")


def _refusal(x: Any) -> str:
    """Why an input is none of those that can be shared out, and what to use instead."""
    kind = type(x)
    if x is None:
        return "No input was given: x is None. Expected arrays, a tf.data.Dataset or a PyDataset."
    if isinstance(x, types.GeneratorType) or hasattr(x, "__next__"):
        what, why = "A generator or iterator", "it can't be asked for one rank's batches only"
    elif kind.__name__ == "DataLoader":
        what, why = "A DataLoader", "its order can't be made the same on all ranks"
    else:
        return (
            f"Input of type {kind.__module__}.{kind.__qualname__} can't be shared out. Expected "
            "NumPy arrays, tensors, pandas or SciPy data (or nested dicts, lists and tuples of "
            "them), a batched tf.data.Dataset, or a keras.utils.PyDataset."
        )
    return (
        f"{what} ({kind.__module__}.{kind.__qualname__}) can't be shared out among ranks: {why}. "
        "Put the code that makes batch i into a keras.utils.PyDataset; or wrap it in "
        "tf.data.Dataset.from_generator(...), of which every rank runs the whole and keeps its "
        "part; or let each rank generate its own data, with a generator and presharded=True."
    )
