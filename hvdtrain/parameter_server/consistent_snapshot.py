"""A moment that is the same on all servers, while workers go on: pure bookkeeping of one server.

A worker sends each gradient to all servers at once, and one server may have taken it before
another. So the chief first asks all of them how far they are; meanwhile they take nothing more. The
furthest is what all can reach, as the gradients that are in it are on their way to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.parameter_server.consistency import Consistency
from hvdtrain.parameter_server.protocol import Kind, Request

__all__ = ["ConsistentSnapshot"]

# What may bring a server beyond the moment.
_HELD = (Kind.PUSH, Kind.LEAVE, Kind.DONE)


class ConsistentSnapshot:
    """Holds requests back that belong to what comes after the moment.

    Args:
        rule: Knows how far the server is.
        workers: By rank, in the order of the rule's.
    """

    def __init__(self, rule: Consistency, workers: Sequence[int]) -> None:
        self._rule = rule
        self._workers = tuple(workers)
        self._frozen = False
        self._limit: Sequence[int] | None = None
        self._held: list[tuple[int, Request]] = []
        self._lost: set[int] = set()

    def lose(self, worker: int) -> None:
        """Wait for nothing from a worker that died.

        Args:
            worker: By rank. A gradient of it may be on one server and not on another.
        """
        self._lost.add(worker)
        self._held = [entry for entry in self._held if entry[0] != worker]

    def begin(self) -> list[int]:
        """Take nothing more until ``aim``; returns how far this server is."""
        self._frozen = True
        return self._rule.progress()

    def aim(self, limit: Sequence[int]) -> None:
        """Take what is missing to be as far as ``limit``, and nothing beyond it."""
        self._limit = limit

    @property
    def reached(self) -> bool:
        """Whether this is the moment."""
        limit = self._limit
        if limit is None:
            return False
        if self._lost and not self._rule.active:
            return True  # what is missing was on its way from the last of them
        return all(
            done >= wanted or worker in self._lost
            for worker, done, wanted in zip(self._workers, self._rule.progress(), limit)
        )

    @property
    def may_advance(self) -> bool:
        """Whether a step may be completed that no request completes, but who is missing."""
        return not self._frozen or (self._limit is not None and not self.reached)

    def end(self) -> None:
        """Let what was held back go on."""
        self._frozen = False
        self._limit = None

    def holds(self, worker: int, request: Request) -> bool:
        """Whether a request has to wait; it comes back from ``next_held``."""
        waits = self._must_wait(worker, request)
        if waits:
            self._held.append((worker, request))
        return waits

    def next_held(self) -> tuple[int, Request] | None:
        """What has waited longest and need not wait any more; None where there is nothing."""
        for number, (worker, request) in enumerate(self._held):
            if not self._must_wait(worker, request):
                return self._held.pop(number)
        return None

    def _must_wait(self, worker: int, request: Request) -> bool:
        if not self._frozen or request.kind not in _HELD:
            return False
        return self._limit is None or self._rule.is_beyond(worker, self._limit)
