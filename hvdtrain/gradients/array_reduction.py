"""Reductions of arrays beyond the engines' own.

That is factors, averages of whole numbers, arrays of several types in one go, and Adasum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp, is_floating, widen

__all__ = ["TensorOp", "adasum", "by_type", "reduce_arrays", "scale"]

TensorOp = ReduceOp | Literal["adasum"]
"""The operations that combine tensors: those of the engines, and Adasum."""


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
    collectives: Engine,
    arrays: Sequence[np.ndarray],
    op: TensorOp,
    *,
    prescale: float,
    postscale: float,
    name: str,
) -> list[np.ndarray]:
    """A grouped allreduce of arrays whose types may differ, the same on every rank.

    ``prescale`` multiplies what goes in, ``postscale`` what comes out; ``name`` stands in errors.
    """
    if op == "adasum":
        scaled = [scale(array, prescale) for array in arrays]
        return [scale(array, postscale) for array in _adasum_all(collectives, scaled, name=name)]
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


def adasum(contributions: Sequence[np.ndarray]) -> np.ndarray:
    """Add arrays where they differ in direction, and average them where they agree.

    Maleki et al. (2020), "Scaling distributed training with adaptive summation", arXiv 2006.02924:
    a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, pairwise in a tree over the ranks.

    Args:
        contributions: Those of all ranks, as many as a power of two, in rank order.

    Returns:
        float64, of their shape.
    """
    level = [np.asarray(array, np.float64) for array in contributions]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2])]
    return level[0]


def _adasum_all(
    collectives: Engine, arrays: Sequence[np.ndarray], *, name: str
) -> list[np.ndarray]:
    """``adasum`` of each of some arrays over all ranks.

    Every rank gets the arrays of all others, so this takes as much memory.

    Raises:
        NotImplementedError: The number of ranks is no power of two, or an array is not floating.
    """
    ranks = collectives.size
    if ranks & (ranks - 1):
        raise NotImplementedError(
            f"Adasum combines ranks in pairs; received {ranks} ranks, expected a power of two."
        )
    for array in arrays:
        if not is_floating(array.dtype):
            raise NotImplementedError(f"Adasum is for floating types; received {array.dtype}.")
    return [
        adasum(list(collectives.allgather(array[np.newaxis], name=name))).astype(array.dtype)
        for array in arrays
    ]


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    both, of_a, of_b = (float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    # Of a vector that is zero nothing is added, whatever its factor.
    return (1 - both / (2 * of_a or 1)) * a + (1 - both / (2 * of_b or 1)) * b
