"""Workers that train apart: each goes its own way, with its own share of the data."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.collectives.single import single_collectives
from hvdtrain.keras.membership import Membership

__all__ = ["IndependentWorker"]


class IndependentWorker(Membership):
    """A worker's place among workers that never meet; it stays within a ``fit``.

    Args:
        worker: By its first number.
        workers: All of them, likewise.
    """

    def __init__(self, worker: int, workers: Sequence[int]) -> None:
        super().__init__(single_collectives(), min_np=1)
        self._me = worker
        self.meet(workers)

    def meet(self, workers: Sequence[int]) -> None:
        """Take a place among all workers that there are now."""
        self.members = tuple(workers)
