"""Reductions of NumPy arrays with scale factors, averages of integers, mixed dtypes, and Adasum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp, is_floating, widen

__all__ = [
    "TensorOp",
    "adasum",
    "by_type",
    "gradient_share",
    "reduce_arrays",
    "scale",
    "weight_correction",
    "without_mean_weight",
]

TensorOp = ReduceOp | Literal["adasum"]
"""The operations of the engine, and Adasum."""


def by_type(values: Sequence[Any]) -> list[list[int]]:
    """Group the indices of tensors or arrays by dtype, in the order of the first ones."""
    indices: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        indices.setdefault(value.dtype, []).append(index)
    return list(indices.values())


def scale(values: np.ndarray, factor: float) -> np.ndarray:
    """Multiply an array by a factor.

    float16 and bfloat16 are multiplied in float32. Integers are multiplied in float64, and the
    result is rounded towards zero.
    """
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
    """Reduce arrays over all ranks. The arrays may have different dtypes.

    Inputs are multiplied by ``prescale``, and results by ``postscale``.
    """
    if op == "adasum":
        scaled = [scale(array, prescale) for array in arrays]
        return [scale(array, postscale) for array in _adasum_all(collectives, scaled, name=name)]
    results: list[np.ndarray] = list(arrays)
    for indices in by_type(arrays):
        how: ReduceOp = op
        factor = postscale
        if op == "average" and not is_floating(arrays[indices[0]].dtype):
            # Round the mean of integers towards zero.
            how, factor = "sum", postscale / collectives.size
        scaled = [scale(arrays[index], prescale) for index in indices]
        reduced = collectives.grouped_allreduce(scaled, how, name=name)
        for index, array in zip(indices, reduced):
            results[index] = scale(array, factor)
    return results


def gradient_share(
    op: TensorOp, upstream: np.ndarray, value: np.ndarray, name: str, collectives: Engine
) -> np.ndarray:
    """Return the gradient of a min, max or product with respect to this rank's value.

    All ranks must call this. If several ranks have the minimum or maximum, the gradient is divided
    equally among these ranks.
    """
    total = collectives.allreduce(upstream, "sum", name=name)
    every = collectives.allgather(value[np.newaxis], name=name)
    if op == "product":
        others = np.delete(every, collectives.rank, axis=0)
        return np.asarray(total * np.prod(others, axis=0), value.dtype)
    best = every.min(axis=0) if op == "min" else every.max(axis=0)
    chosen = (every == best).astype(value.dtype)
    return np.asarray(total * chosen[collectives.rank] / chosen.sum(axis=0), value.dtype)


def adasum(contributions: Sequence[np.ndarray]) -> np.ndarray:
    """Combine arrays with Adasum, which adds orthogonal arrays and averages parallel ones.

    Two arrays a and b are combined to (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. More arrays are
    combined pairwise, and the results are combined again, until one array is left. The number of
    arrays must be a power of two. The result is float64. See Maleki et al. 2020, "Scaling
    distributed training with adaptive summation", arXiv 2006.02924.
    """
    level = [np.asarray(array, np.float64) for array in contributions]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2])]
    return level[0]


def _adasum_all(
    collectives: Engine, arrays: Sequence[np.ndarray], *, name: str
) -> list[np.ndarray]:
    """Combine arrays of all ranks with ``adasum``, one by one. A rank needs memory for all."""
    ranks = collectives.size
    if ranks & (ranks - 1):
        raise NotImplementedError(
            f"Adasum needs a power of two as the number of ranks, got {ranks}."
        )
    for array in arrays:
        if not is_floating(array.dtype):
            raise NotImplementedError(f"Adasum needs a floating dtype, got {array.dtype}.")
    return [
        adasum(list(collectives.allgather(array[np.newaxis], name=name))).astype(array.dtype)
        for array in arrays
    ]


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    ab, aa, bb = (float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    # The factor of a zero vector does not matter.
    return (1 - ab / (2 * aa or 1)) * a + (1 - ab / (2 * bb or 1)) * b


def without_mean_weight(
    averages: Sequence[np.ndarray], mean_weight: float, dtype: np.dtype | None = None
) -> list[np.ndarray]:
    """Divide averages of weighted arrays by the mean weight, which was computed in ``dtype``.

    The mean weight is 1 unless a rank was lost. ``dtype`` defaults to the dtype of the averages.
    """
    factor = weight_correction(mean_weight, dtype or averages[0].dtype)
    if factor == 1.0:
        return list(averages)
    return [average * average.dtype.type(factor) for average in averages]


def weight_correction(mean_weight: float, dtype: np.dtype) -> float:
    """Return the factor by which averages are multiplied to make the mean weight 1.

    The factor is exactly 1 if the mean weight differs from 1 only by a rounding error.
    """
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    if mean_weight <= 0 or abs(mean_weight - 1.0) <= 8 * epsilon:
        return 1.0
    return 1.0 / mean_weight
