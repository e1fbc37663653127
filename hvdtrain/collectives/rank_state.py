"""The state of the ranks, which an engine and its transport share."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvdtrain.errors import TooFewRanksError

__all__ = ["RankState"]

# Ranks in step are through with most operations in less.
LONG_S = 0.01


class RankState:
    """The state that an engine and its transport share: which ranks there are, where this one is.

    The transport writes who the ranks are, the engine where this one is. Attributes without a
    description here are those of ``hvdtrain.collectives.engine.Engine``.

    Attributes:
        contributed: The first numbers of the ranks that had a part in the latest operation.
        operation: The number, from 1, of the operation that this rank is in, or was in last.
        inside: Since when, on the monotonic clock, this rank is in which operation; None for none.
            Other threads may ask.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.members: tuple[int, ...] = (0,)
        self.numbers: tuple[int, ...] = self.members
        self.contributed: tuple[int, ...] = self.members
        self.survives_losses = False
        self.generation = 0
        self.too_few: TooFewRanksError | None = None
        self.operation = 0
        self.inside: tuple[float, str] | None = None

    @property
    def member(self) -> int:
        """This rank's first number, which it keeps when others are lost."""
        return self.members[self.rank]

    @property
    def number(self) -> int:
        """This rank's number in the job, by which errors call it."""
        return self.numbers[self.member]

    @property
    def waiting_in(self) -> str:
        """The operation in which this rank waits for long, or ""; for other threads to ask."""
        inside = self.inside
        return inside[1] if inside and time.monotonic() - inside[0] > LONG_S else ""

    def count(self, rank: int, size: int, numbers: Sequence[int] | None = None) -> None:
        """Say which ranks there are before any is lost.

        Args:
            rank: This one.
            size: How many there are.
            numbers: Their numbers in the job, where they are some of its ranks.
        """
        self.rank, self.size = rank, size
        self.members = self.contributed = tuple(range(size))
        self.numbers = self.members if numbers is None else tuple(numbers)
