"""Matrices that cross as the product of two narrow ones.

PowerSGD: Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv 1905.13727, algorithm 1. A matrix M becomes P Q^T by one step of power
iteration, which begins with the Q of the step before: P = M Q, made orthonormal, and Q = M^T P.
Both are linear in M, so that the means of the ranks' P and Q are those of their mean M. It makes no
difference whether the ranks of a host add up their M, or P and Q as they do here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.interface import Collectives
from hvdtrain.gradients.compressors.interface import GradientCompressor, SentMeans

__all__ = ["LowRank", "matrix_shape", "orthonormal"]

# A column of which no more is left beside earlier ones is their combination, but for rounding.
_DEPENDENT = 1e-6
# What is multiplied and added, one column after the other, stays within the core's own cache.
_BLOCK_ITEMS = 32 << 10


class LowRank(GradientCompressor):
    """Sends two narrow matrices for each that is large enough to pay: PowerSGD.

    Args:
        rank: How many columns P and Q have.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def takes(self, shape: tuple[int, ...]) -> bool:
        # Two rounds and some arithmetic have to pay.
        items = math.prod(shape)
        return len(shape) > 1 and 0 < 2 * self._rank * sum(matrix_shape(shape)) <= items

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of Q, whose columns have a length of 1; one of zeros begins anew."""
        return matrix_shape(shape)[1], self._rank

    def average(
        self,
        collectives: Collectives,
        arrays: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        *,
        weight: float,
        name: str,
    ) -> SentMeans:
        matrices = [array.reshape(matrix_shape(array.shape)) for array in arrays]
        begin = [_begun(state) for state in states]
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
                [_of_unit_length(columns) for columns in right],
                float(weights[0]),
            )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a matrix of an array's values: its axes are cut where both are fewest.

    A kernel of a convolution, whose last axis is the output, becomes (height * width * input,
    output) where there are many channels, as in the paper.

    Args:
        shape: Two axes or more.
    """
    cuts = [(math.prod(shape[:n]), math.prod(shape[n:])) for n in range(1, len(shape))]
    return min(cuts, key=sum)


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the columns, by Gram-Schmidt in float64.

    In place of a column that depends on those before it there are zeros. What is not finite stays
    so. Without BLAS, whose rounding depends on the processor: all hosts must get the same bits.
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


def _of_unit_length(columns: np.ndarray) -> np.ndarray:
    """Scale columns to a length of 1, so that P is as large as the gradient; zeros stay so."""
    lengths = np.sqrt(np.square(columns, dtype=np.float64).sum(axis=0))
    return (columns / np.where(lengths > 0, lengths, 1.0)).astype(columns.dtype)


def _begun(state: np.ndarray) -> np.ndarray:
    """The Q to begin with: columns of zeros are drawn, the same ones each time."""
    known = state.any(axis=0)
    if known.all():
        return state
    drawn = np.random.default_rng(0).standard_normal(state.shape, state.dtype.type)
    return np.where(known, state, drawn)


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``left @ right.T`` without BLAS, for the same reason as ``orthonormal``."""
    total = np.empty((len(left), len(right)), left.dtype)
    rows = max(1, _BLOCK_ITEMS // len(right))
    across = np.ascontiguousarray(right.T)
    for start in range(0, len(left), rows):
        block, down = total[start : start + rows], left[start : start + rows, :, np.newaxis]
        np.multiply(down[:, 0], across[0], out=block)
        for number in range(1, len(across)):
            block += down[:, number] * across[number]
    return total
