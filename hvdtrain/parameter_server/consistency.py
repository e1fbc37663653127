"""Who may go on when, and which gradients count; pure bookkeeping of one server.

``Asynchronous`` applies each gradient as it comes. With a bound it is stale synchronous parallel
(Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server").
``Synchronous`` waits for the gradients of a step; with backup workers it takes the first ones
(Chen et al. 2016, arXiv 1604.00981).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

__all__ = ["Asynchronous", "Consistency", "Synchronous"]


class Consistency(Protocol):
    """What a server asks."""

    gathers: bool
    """Whether gradients wait for those of other workers, and are applied together."""

    active: set[int]
    """Whose gradients are waited for."""

    def push(self, worker: int, step: int) -> bool:
        """Note a worker's gradient; whether it counts, or comes too late."""
        ...

    def complete(self) -> bool:
        """Whether what was gathered is to be applied now; if so, a new step begins."""
        ...

    def may_go_on(self, worker: int) -> bool:
        """Whether a worker may have weights for its next step."""
        ...

    def next_step(self, worker: int) -> int:
        """The number of that step."""
        ...

    def leave(self, worker: int) -> None:
        """Wait for a worker's gradients no more: it has ended, died, or says nothing."""
        ...

    def come_back(self, worker: int) -> None:
        """Wait for a worker again, which had only been silent."""
        ...

    def progress(self) -> list[int]:
        """How far this server is, in numbers that never fall; as many as there are workers.

        Servers on which they are equal have applied the same gradients.
        """
        ...

    def is_beyond(self, worker: int, limit: Sequence[int]) -> bool:
        """Whether one more of a worker's requests might bring ``progress`` beyond ``limit``."""
        ...


class Asynchronous:
    """Workers go on without each other.

    Args:
        workers: By rank.
        bound: How many steps a worker may be ahead of the slowest; None for any number.
    """

    gathers = False

    def __init__(self, workers: Collection[int], bound: int | None) -> None:
        self._pushed = dict.fromkeys(workers, 0)
        self._clocks = dict.fromkeys(workers, 0)  # as pushed, but who comes back is not behind
        self.active = set(workers)
        self._bound = bound

    def push(self, worker: int, step: int) -> bool:
        self._pushed[worker] += 1
        self._clocks[worker] += 1
        return True

    def complete(self) -> bool:
        return False

    def may_go_on(self, worker: int) -> bool:
        if self._bound is None:
            return True
        return self._clocks[worker] - self._slowest <= self._bound

    def next_step(self, worker: int) -> int:
        return self._pushed[worker]

    def leave(self, worker: int) -> None:
        self.active.discard(worker)

    def come_back(self, worker: int) -> None:
        self._clocks[worker] = max(self._clocks[worker], self._slowest)
        self.active.add(worker)

    @property
    def _slowest(self) -> int:
        return min((self._clocks[worker] for worker in self.active), default=0)

    def progress(self) -> list[int]:
        return list(self._pushed.values())

    def is_beyond(self, worker: int, limit: Sequence[int]) -> bool:
        return self._pushed[worker] >= limit[list(self._pushed).index(worker)]


class Synchronous:
    """Workers make each step together.

    Args:
        workers: By rank.
        wanted: How many of them make a step: the first ones. All if not given.
    """

    gathers = True

    def __init__(self, workers: Collection[int], wanted: int | None = None) -> None:
        self.active = set(workers)
        self._size = len(workers)
        self._wanted = self._size if wanted is None else wanted
        self._has_backup = self._wanted < self._size
        self._step = 0
        self._taken: set[int] = set()

    def push(self, worker: int, step: int) -> bool:
        if step != self._step:
            return False
        self._taken.add(worker)
        return True

    def complete(self) -> bool:
        # Who has ended after it pushed still counts, and nobody waits for who ended before.
        waited_for = len(self.active | self._taken)
        if not self._taken or len(self._taken) < min(self._wanted, waited_for):
            return False
        self._step += 1
        self._taken = set()
        return True

    def may_go_on(self, worker: int) -> bool:
        return worker not in self._taken

    def next_step(self, worker: int) -> int:
        return self._step

    def leave(self, worker: int) -> None:
        self.active.discard(worker)

    def come_back(self, worker: int) -> None:
        self.active.add(worker)

    def progress(self) -> list[int]:
        # With backup workers each server takes the gradients that came to it first: there is no
        # moment at which all have the same.
        return [0 if self._has_backup else self._step] * self._size

    def is_beyond(self, worker: int, limit: Sequence[int]) -> bool:
        return self.progress()[0] >= limit[0]
