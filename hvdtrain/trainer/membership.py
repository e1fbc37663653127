"""The ranks that take part in training. All ranks agree on this list.

In an elastic job the engine detects a lost rank while it runs a collective. Some ranks may detect
the loss in an earlier collective than other ranks. Decisions that must be equal on all ranks, such
as how to divide the data, therefore use ``Membership``. It changes on all ranks at the same point
of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import TooFewRanksError

__all__ = ["Change", "ChangeCallback", "Membership"]


class Change(NamedTuple):
    """A change of the list of ranks: the list before the change, and the list after it.

    Both lists contain the numbers that the ranks had at the start of the job, in ascending order.
    """

    before: tuple[int, ...]
    now: tuple[int, ...]

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost."""
        return tuple(member for member in self.before if member not in self.now)

    @property
    def lost_chief(self) -> bool:
        """Whether the chief was lost."""
        return self.before[0] != self.now[0]


ChangeCallback = Callable[[Change], None]


class Membership:
    """The ranks that take part in training.

    Args:
        min_np: Training ends with an error if fewer than this number of ranks remain.
        callbacks: Called on all ranks after a rank was lost.
    """

    def __init__(
        self, collectives: Engine, min_np: int, callbacks: Sequence[ChangeCallback] = ()
    ) -> None:
        self._collectives = collectives
        self._min_np = min_np
        self.members = collectives.members
        """The initial ranks of the members, in order."""
        self._me = self.members[collectives.rank]
        self._generation = collectives.generation
        self._callbacks = list(callbacks)

    @property
    def rank(self) -> int:
        """The index of this rank among the ranks that take part in training."""
        return self.members.index(self._me)

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the chief, which is the first rank that takes part in training."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """The number of ranks that take part in training."""
        return len(self.members)

    @property
    def elastic(self) -> bool:
        """Whether training continues after a rank is lost."""
        return self._collectives.survives_losses

    @property
    def too_few(self) -> TooFewRanksError | None:
        """The error to raise after a checkpoint. None if at least ``min_np`` ranks are left."""
        return self._collectives.too_few if self.size < self._min_np else None

    @contextmanager
    def notifying(self, callbacks: Sequence[ChangeCallback]) -> Iterator[None]:
        """Add callbacks, which are called in order if a rank is lost within the block."""
        self._callbacks += callbacks
        try:
            yield
        finally:
            del self._callbacks[-len(callbacks) :]

    def renew_and_check_chief(self) -> bool:
        """Call ``renew``, and return whether the chief was lost since the previous call."""
        chief = self.members[0]
        self.renew()
        return chief != self.members[0]

    def renew(self) -> bool:
        """Remove lost ranks and call the callbacks. In an elastic job all ranks must call this.

        Returns:
            Whether ranks were lost. The result is the same on all ranks.
        """
        if not self.elastic:
            return False
        newest = self._collectives.allreduce(
            np.array(self._collectives.generation), "max", name="membership generation"
        )
        if int(newest) == self._generation:
            return False
        self._generation = int(newest)
        # Not collectives.members, because another rank may be lost by now, and only some ranks may
        # have detected that.
        members = self._collectives.allgather(np.array([self._me]), name="members")
        change = Change(self.members, tuple(int(member) for member in members))
        if not change.lost:
            return False
        self.members = change.now
        for callback in self._callbacks:
            callback(change)
        return True
