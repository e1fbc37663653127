"""What reductions of arrays offer beyond the engines' own.

That is factors, averages of whole numbers, arrays of several types in one go, and Adasum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.collectives.interface import Collectives, ReduceOp
from hvdtrain.collectives.kernels import is_floating, widen
from hvdtrain.gradients.adasum import adasum_all

__all__ = ["TensorOp", "by_type", "reduce_arrays", "scale"]

TensorOp = ReduceOp | Literal["adasum"]
"""How tensors can be combined: as the engines do, or by Adasum."""


def by_type(values: Sequence[Any]) -> list[list[int]]:
    """The places of tensors or arrays of one type each, in the order of the first of each."""
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value.dtype, []).append(place)
    return list(places.values())


def scale(values: np.ndarray, factor: float) -> np.ndarray:
    """Multiply; half types in float32, and whole numbers in float64, of which the fraction goes."""
    if factor == 1.0:
        return values
    if is_floating(values.dtype):
        wide = widen(values)
        return np.asarray(wide * wide.dtype.type(factor)).astype(values.dtype, copy=False)
    return np.asarray(values.astype(np.float64) * factor).astype(values.dtype)


def reduce_arrays(
    collectives: Collectives,
    arrays: Sequence[np.ndarray],
    op: TensorOp,
    *,
    prescale: float,
    postscale: float,
    name: str,
) -> list[np.ndarray]:
    """A grouped allreduce of arrays whose types may differ.

    Args:
        collectives: The engine that does it.
        arrays: This rank's arrays, of the same shapes and types on every rank.
        op: How they are combined.
        prescale: Multiplies what goes in.
        postscale: Multiplies what comes out.
        name: Stands in errors.
    """
    if op == "adasum":
        scaled = [scale(array, prescale) for array in arrays]
        return [scale(array, postscale) for array in adasum_all(collectives, scaled, name=name)]
    results: list[np.ndarray] = list(arrays)
    for places in by_type(arrays):
        how: ReduceOp = op
        factor = postscale
        if op == "average" and not is_floating(arrays[places[0]].dtype):
            # Whole numbers have no mean of their own type: the fraction of it goes.
            how, factor = "sum", postscale / collectives.size
        scaled = [scale(arrays[place], prescale) for place in places]
        reduced = collectives.grouped_allreduce(scaled, how, name=name)
        for place, array in zip(places, reduced):
            results[place] = scale(array, factor)
    return results
