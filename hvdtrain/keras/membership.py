"""The membership: the ranks that are there, as all of them know it together.

Where ranks may be lost, the engine's own numbers change on each rank within some operation, and on
one rank earlier than on another. What all must do alike, sharing out the data above all, goes by
the numbers here, which change on all ranks at the same point of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import TooFewRanksError

__all__ = ["Change", "Follower", "Membership"]


class Change(NamedTuple):
    """A change of membership: the ranks before and now, by their first numbers, in order."""

    before: tuple[int, ...]
    now: tuple[int, ...]

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that are no longer there."""
        return tuple(member for member in self.before if member not in self.now)

    @property
    def of_chief(self) -> bool:
        """Whether another rank is the chief now."""
        return self.before[0] != self.now[0]


Follower = Callable[[Change], None]


class Membership:
    """The ranks that take part.

    Args:
        min_np: How many ranks have to be left.
        followers: Called when ranks are lost, on all ranks.
    """

    def __init__(
        self, collectives: Engine, min_np: int, followers: Sequence[Follower] = ()
    ) -> None:
        self._collectives = collectives
        self._min_np = min_np
        self.members = collectives.members
        """The first numbers of the ranks that are there, in order."""
        self._me = self.members[collectives.rank]
        self._generation = collectives.generation
        self._followers = list(followers)

    @property
    def rank(self) -> int:
        """This rank's number among those that are there."""
        return self.members.index(self._me)

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the first of them."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """The number of ranks that are there."""
        return len(self.members)

    @property
    def elastic(self) -> bool:
        """Whether ranks may be lost."""
        return self._collectives.survives_losses

    @property
    def too_few(self) -> TooFewRanksError | None:
        """The error to raise when all has been saved, if fewer are left than there have to be."""
        return self._collectives.too_few if self.size < self._min_np else None

    @contextmanager
    def followed_by(self, followers: Sequence[Follower]) -> Iterator[None]:
        """Within the block call these, in their order, when ranks are lost; on all ranks."""
        self._followers += followers
        try:
            yield
        finally:
            del self._followers[-len(followers) :]

    def renew_and_check_chief_lost(self) -> bool:
        """Renew, and return whether the chief is among those that were lost."""
        before = self.members
        self.renew()
        return Change(before, self.members).of_chief

    def renew(self) -> bool:
        """Find out whether ranks were lost since the last time; collective where that can be.

        Returns:
            Whether some were; the followers have been called then. Alike on all ranks.
        """
        if not self.elastic:
            return False
        newest = self._collectives.allreduce(
            np.array(self._collectives.generation), "max", name="who is there"
        )
        if int(newest) == self._generation:
            return False
        self._generation = int(newest)
        # Not the engine's own: another rank may be lost by now, and some of them know it already.
        there = self._collectives.allgather(np.array([self._me]), name="who is left")
        change = Change(self.members, tuple(int(member) for member in there))
        if not change.lost:
            return False
        self.members = change.now
        for follow in self._followers:
            follow(change)
        return True
