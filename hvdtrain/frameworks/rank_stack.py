"""The operation ``stack_ranks`` on NumPy arrays."""

from __future__ import annotations

import numpy as np

from hvdtrain.collectives.engine import Engine

__all__ = ["RankStack"]


class RankStack:
    """The operation ``stack_ranks`` and its gradient, on NumPy arrays, for torch and JAX.

    Both have static shapes, which don't change when ranks are lost.
    """

    def __init__(self, collectives: Engine, name: str) -> None:
        self._collectives = collectives
        self._name = name
        self.rows = len(collectives.numbers)
        """The number of ranks at the start of the job, which is the number of rows."""

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, stacked."""
        collectives = self._collectives
        arrays = collectives.allgather(array[np.newaxis], name=self._name)
        stacked = np.zeros((self.rows, *array.shape), array.dtype)
        stacked[list(collectives.contributed)] = arrays
        return stacked

    def scatter(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of this rank's array, given the gradient of the stacked arrays."""
        collectives, label = self._collectives, f"gradient of {self._name}"
        if not collectives.survives_losses:
            return collectives.reduce_scatter(gradient, "sum", name=label)[0]
        return collectives.allreduce(gradient, "sum", name=label)[collectives.member]
