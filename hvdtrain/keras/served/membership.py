"""Workers that train apart: each goes its own way, with its own share of the data."""

from __future__ import annotations

from hvdtrain.collectives.single import SingleCollectives
from hvdtrain.keras.membership import Membership

__all__ = ["Apart"]


class Apart(Membership):
    """A worker's place among workers that never meet.

    Args:
        rank: Number of this worker.
        size: How many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(SingleCollectives(), min_np=1)
        self._place = rank, size

    @property
    def rank(self) -> int:
        return self._place[0]

    @property
    def size(self) -> int:
        return self._place[1]
