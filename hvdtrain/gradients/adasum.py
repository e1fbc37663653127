"""Adasum: gradients added where they differ in direction, averaged where they agree.

Maleki et al. (2020), "Scaling distributed training with adaptive summation", arXiv 2006.02924:
a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, pairwise in a tree over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.interface import Collectives
from hvdtrain.collectives.kernels import is_floating

__all__ = ["adasum", "adasum_all"]


def adasum(contributions: Sequence[np.ndarray]) -> np.ndarray:
    """Combine the arrays of all ranks; float64, of their shape.

    Args:
        contributions: As many as a power of two, in rank order.
    """
    level = [np.asarray(array, np.float64) for array in contributions]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2])]
    return level[0]


def adasum_all(
    collectives: Collectives, arrays: Sequence[np.ndarray], *, name: str
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
