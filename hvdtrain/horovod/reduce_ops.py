"""What Horovod's reductions add to those of the engines: factors, and averages of whole numbers."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.interface import Collectives
from hvdtrain.collectives.interface import ReduceOp as EngineOp
from hvdtrain.collectives.kernels import is_floating, widen
from hvdtrain.gradients.adasum import adasum_all

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "choose_op",
    "reduce_all",
    "scale",
]


class ReduceOp(enum.IntEnum):
    """How values are combined; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @property
    def of_engine(self) -> EngineOp:
        """What the engines call it; they have no Adasum."""
        return _OF_ENGINE[self]


Adasum = ReduceOp.Adasum
Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
_OF_ENGINE: dict[ReduceOp, EngineOp] = {
    Average: "average",
    Sum: "sum",
    Min: "min",
    Max: "max",
    Product: "product",
}


def choose_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """What is meant by ``op`` and by the older ``average``; Average if neither is given.

    Raises:
        ValueError: Both are, or ``op`` is none.
    """
    if op is not None and average is not None:
        raise ValueError(
            f"Received op={op!r} and average={average!r}; expected one of them. average is the "
            "older name: leave it out."
        )
    if op is None:
        return Sum if average is False else Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(entry.name for entry in ReduceOp)
        raise ValueError(f"op={op!r} is no reduction; expected one of {names}.") from None


def scale(values: np.ndarray, factor: float) -> np.ndarray:
    """Multiply; half types in float32, and whole numbers in float64, of which the fraction goes."""
    if factor == 1.0:
        return values
    if is_floating(values.dtype):
        wide = widen(values)
        return np.asarray(wide * wide.dtype.type(factor)).astype(values.dtype, copy=False)
    return np.asarray(values.astype(np.float64) * factor).astype(values.dtype)


def reduce_all(
    collectives: Collectives,
    arrays: Sequence[np.ndarray],
    op: ReduceOp,
    *,
    prescale: float,
    postscale: float,
    name: str,
) -> list[np.ndarray]:
    """A grouped allreduce of arrays whose types may differ.

    Args:
        collectives: The engine.
        arrays: Same shapes and types on every rank.
        op: How.
        prescale: Multiplies what goes in.
        postscale: Multiplies what comes out.
        name: For errors.
    """
    if op is Adasum:
        scaled = [scale(array, prescale) for array in arrays]
        return [scale(array, postscale) for array in adasum_all(collectives, scaled, name=name)]
    results: list[np.ndarray] = list(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
        whole_average = op is Average and not is_floating(dtype)
        # Whole numbers have no mean of their own type: the fraction of it goes.
        how, factor = (Sum, postscale / collectives.size) if whole_average else (op, postscale)
        scaled = [scale(arrays[place], prescale) for place in places]
        reduced = collectives.grouped_allreduce(scaled, how.of_engine, name=name)
        for place, array in zip(places, reduced):
            results[place] = scale(array, factor)
    return results
