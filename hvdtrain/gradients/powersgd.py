"""PowerSGD, which sends gradients between hosts as the product of two narrow matrices.

Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv 1905.13727, algorithm 1. A matrix M is approximated by P Q^T with one step of
power iteration, which starts from the Q of the previous training step. P is M Q, orthonormalized,
and the new Q is M^T P. Both products are linear in M, so averaging them over the ranks gives the
products for the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.engine import Engine

__all__ = ["PowerSGD", "SentMeans", "matrix_shape", "orthonormal"]

# If less than this share of a column remains, it is a linear combination of earlier columns.
_DEPENDENT = 1e-6
# Rows are multiplied in blocks of this many items, which fit into a core's own cache.
_BLOCK_ITEMS = 32 << 10


class SentMeans(NamedTuple):
    """The result of averaging arrays of all ranks."""

    means: list[np.ndarray]  # the approximate means, bitwise identical on all ranks
    # This rank's arrays minus ``means``. The mean of ``unsent`` over the ranks is the error of
    # ``means``.
    unsent: list[np.ndarray]
    states: list[np.ndarray]  # the states to pass to the next call of ``average``
    weight: float  # the mean of the ranks' weights


class PowerSGD:
    """Averages float32 arrays over all ranks approximately, with low-rank matrices.

    ``rank`` is the number of columns of P and Q. If an array contains NaN or infinity on any rank,
    the average contains NaN or infinity too.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Return whether compression at least halves the size of an array with this shape."""
        items = math.prod(shape)
        return len(shape) > 1 and 0 < 2 * self._rank * sum(matrix_shape(shape)) <= items

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the state for an array with this shape.

        The state is Q with columns of length 1. Before the first step it must be zeros.
        """
        return matrix_shape(shape)[1], self._rank

    def average(
        self,
        collectives: Engine,
        arrays: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        *,
        weight: float,
        name: str,
    ) -> SentMeans:
        """Average the arrays of all ranks.

        All ranks must call this, with arrays of shapes that ``takes`` accepts. ``states`` come from
        the previous call, and are the same on all ranks. ``weight`` is averaged exactly, over the
        ranks that contribute to the means.
        """
        matrices = [array.reshape(matrix_shape(array.shape)) for array in arrays]
        begin = [_warm_start(state) for state in states]
        weights = np.array([weight], np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            left = [matrix @ right for matrix, right in zip(matrices, begin)]
            left = collectives.grouped_allreduce(left, "average", name=f"P of {name}")
            left = [orthonormal(columns) for columns in left]
            right = [matrix.T @ columns for matrix, columns in zip(matrices, left)]
            *right, weights = collectives.grouped_allreduce(
                [*right, weights], "average", name=f"Q of {name}"
            )
            means = [_product(*factors) for factors in zip(left, right)]
            unsent = [matrix - mean for matrix, mean in zip(matrices, means)]
            return SentMeans(
                [mean.reshape(array.shape) for mean, array in zip(means, arrays)],
                [rest.reshape(array.shape) for rest, array in zip(unsent, arrays)],
                [_normalized(columns) for columns in right],
                float(weights[0]),
            )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the matrix shape with the smallest number of rows plus columns for an array.

    A convolution kernel, whose last axis is the output, becomes (height * width * input, output)
    if it has many channels, as in the paper.
    """
    cuts = [(math.prod(shape[:n]), math.prod(shape[n:])) for n in range(1, len(shape))]
    return min(cuts, key=sum)


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the columns, by Gram-Schmidt in float64.

    Dependent columns become zeros. NaN and infinity remain. BLAS is not used, because its rounding
    depends on the processor, and all hosts must get the same bits.
    """
    basis = np.array(columns.T, np.float64, order="C")
    for number, column in enumerate(basis):
        before = _length(column)
        for other in basis[:number]:
            column -= (column * other).sum() * other
        length = _length(column)
        column *= 0.0 if length <= _DEPENDENT * before else 1.0 / length
    return basis.T.astype(columns.dtype)


def _length(column: np.ndarray) -> float:
    return float(np.sqrt((column * column).sum()))


def _normalized(columns: np.ndarray) -> np.ndarray:
    """Scale columns to length 1, so that P has the gradient's magnitude. Zeros stay zeros."""
    lengths = np.sqrt(np.square(columns, dtype=np.float64).sum(axis=0))
    return (columns / np.where(lengths > 0, lengths, 1.0)).astype(columns.dtype)


def _warm_start(state: np.ndarray) -> np.ndarray:
    """Replace columns of zeros with random columns. The random seed is fixed."""
    known = state.any(axis=0)
    if known.all():
        return state
    drawn = np.random.default_rng(0).standard_normal(state.shape, state.dtype.type)
    return np.where(known, state, drawn)


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return ``left @ right.T`` without BLAS, so that all hosts get the same bits."""
    total = np.empty((len(left), len(right)), left.dtype)
    rows = max(1, _BLOCK_ITEMS // len(right))
    across = np.ascontiguousarray(right.T)
    for start in range(0, len(left), rows):
        block, down = total[start : start + rows], left[start : start + rows, :, np.newaxis]
        np.multiply(down[:, 0], across[0], out=block)
        for number in range(1, len(across)):
            block += down[:, number] * across[number]
    return total
