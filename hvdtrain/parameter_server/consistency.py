"""Consistency models: who may go on when, which gradients count; pure bookkeeping of one server.

``Asynchronous`` applies each gradient as it comes. With a bound it is stale synchronous parallel
(Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server").
``Synchronous`` waits for the gradients of a step; with backup workers it takes the first ones
(Chen et al. 2016, arXiv 1604.00981). ``WorkerLiveness`` knows whom to wait for, and
``ConsistentSnapshot`` what has to wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from hvdtrain.parameter_server.protocol import Kind, Request

__all__ = ["Asynchronous", "Consistency", "ConsistentSnapshot", "Synchronous", "WorkerLiveness"]

# Requests that may bring a server further.
_ADVANCING = (Kind.PUSH, Kind.LEAVE, Kind.END)


class Consistency(ABC):
    """A consistency model: what a server asks of the ranks that train before they go on."""

    gathers: bool
    """Whether gradients wait for those of other workers, and are applied together."""

    def __init__(self, workers: Collection[int]) -> None:
        self.active = set(workers)
        """The workers whose gradients are waited for."""

    @abstractmethod
    def push(self, worker: int, step: int) -> bool:
        """Note a worker's gradient; returns whether it counts, or comes too late."""

    @abstractmethod
    def complete(self) -> bool:
        """Returns whether what was gathered is to be applied now; if so, a new step begins."""

    @abstractmethod
    def may_go_on(self, worker: int) -> bool:
        """Returns whether a worker may have weights for its next step."""

    @abstractmethod
    def next_step(self, worker: int) -> int:
        """Returns the number of a worker's next step."""

    @abstractmethod
    def progress(self) -> list[int]:
        """Returns how far this server is, in numbers that never fall; one for each worker.

        Servers on which they are equal have applied the same gradients.
        """

    @abstractmethod
    def is_beyond(self, worker: int, limit: Sequence[int]) -> bool:
        """Returns whether one more request may bring a worker's ``progress`` beyond ``limit``."""

    def leave(self, worker: int) -> None:
        """Wait for a worker's gradients no more: it has ended, died, or says nothing."""
        self.active.discard(worker)

    def come_back(self, worker: int) -> None:
        """Wait for a worker again, which had only been silent."""
        self.active.add(worker)


class Asynchronous(Consistency):
    """Workers go on without each other, up to ``bound`` steps (None: any) ahead of the slowest."""

    gathers = False

    def __init__(self, workers: Collection[int], bound: int | None) -> None:
        super().__init__(workers)
        self._pushed = dict.fromkeys(workers, 0)
        self._clocks = dict.fromkeys(workers, 0)  # as pushed, but who comes back is not behind
        self._bound = bound

    def push(self, worker: int, step: int) -> bool:
        self._pushed[worker] += 1
        self._clocks[worker] += 1
        return True

    def complete(self) -> bool:
        return False

    def may_go_on(self, worker: int) -> bool:
        return self._bound is None or self._clocks[worker] - self._slowest <= self._bound

    def next_step(self, worker: int) -> int:
        return self._pushed[worker]

    def come_back(self, worker: int) -> None:
        self._clocks[worker] = max(self._clocks[worker], self._slowest)
        super().come_back(worker)

    @property
    def _slowest(self) -> int:
        return min((self._clocks[worker] for worker in self.active), default=0)

    def progress(self) -> list[int]:
        return list(self._pushed.values())

    def is_beyond(self, worker: int, limit: Sequence[int]) -> bool:
        return self._pushed[worker] >= limit[list(self._pushed).index(worker)]


class Synchronous(Consistency):
    """Workers make each step together: the first ``wanted`` ones, or all if not given."""

    gathers = True

    def __init__(self, workers: Collection[int], wanted: int | None = None) -> None:
        super().__init__(workers)
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

    def progress(self) -> list[int]:
        # With backup workers each server takes the gradients that came to it first: there is no
        # moment at which all have the same.
        return [0 if self._has_backup else self._step] * self._size

    def is_beyond(self, worker: int, limit: Sequence[int]) -> bool:
        return self.progress()[0] >= limit[0]


class WorkerLiveness:
    """The liveness of workers: which of them may still send something.

    A worker that has an answer is expected to speak again. One that takes longer than ``silence_s``
    is silent until it does, but for the chief: it validates and saves in between, and without it
    nothing goes on anyway. So does the first step, which comes with the compilation of the model.
    """

    def __init__(self, workers: Sequence[int], silence_s: float = math.inf) -> None:
        self._chief = workers[0]
        self._silence_s = silence_s
        self.there = set(workers)
        """The workers that have neither said that they are done, nor died."""
        self.training = set(workers)
        """The workers that may still send gradients."""
        self._stepped: set[int] = set()
        self._expected: dict[int, float] = {}  # since when; infinity for those that are silent

    def hear(self, worker: int) -> bool:
        """Note that a worker speaks; returns whether it had been silent."""
        return self._expected.pop(worker, 0.0) == math.inf

    def note_step(self, worker: int) -> None:
        self._stepped.add(worker)

    def answer(self, worker: int, now: float) -> None:
        """Note that a worker got its answer; ``now`` by a monotonic clock."""
        if worker in self._stepped and worker in self.training and worker != self._chief:
            self._expected[worker] = now

    def stop_training(self, worker: int) -> None:
        """Note that a worker sends no gradients any more."""
        self.training.discard(worker)
        self._expected.pop(worker, None)

    def end(self, worker: int) -> None:
        """Note that nothing more comes from a worker: it is done, or died."""
        self.stop_training(worker)
        self.there.discard(worker)

    @property
    def next_silence(self) -> float:
        """The time at which the next worker falls silent, if it says nothing; infinity for none."""
        return min(self._expected.values(), default=math.inf) + self._silence_s

    def fall_silent(self, now: float) -> list[int]:
        """Returns the workers that are silent from now on."""
        silent = [w for w, since in self._expected.items() if now >= since + self._silence_s]
        self._expected.update(dict.fromkeys(silent, math.inf))
        return silent


class ConsistentSnapshot:
    """A moment that is the same on all servers, while workers go on.

    A worker sends each gradient to all servers at once, and one server may have taken it before
    another. So the chief first asks all of them how far they are; meanwhile they take nothing more.
    The furthest is what all can reach, as the gradients that are in it are on their way to each of
    them. Requests that belong to what comes after the moment are held back until it has been.
    """

    def __init__(self, consistency: Consistency, workers: Sequence[int]) -> None:
        self._consistency = consistency
        self._workers = tuple(workers)
        self._frozen = False
        self._limit: Sequence[int] | None = None  # of each worker's progress
        self._held: list[tuple[int, Request]] = []
        self._lost: set[int] = set()

    def lose(self, worker: int) -> None:
        """Wait for nothing from a worker that died, whose last gradient only some servers have."""
        self._lost.add(worker)
        self._held = [entry for entry in self._held if entry[0] != worker]

    def begin(self) -> list[int]:
        """Take nothing more until ``aim``; returns how far this server is."""
        self._frozen = True
        return self._consistency.progress()

    def aim(self, limit: Sequence[int]) -> None:
        """Take what is missing to be as far as ``limit``, and nothing beyond it."""
        self._limit = limit

    @property
    def reached(self) -> bool:
        """Whether this is the moment."""
        limit = self._limit
        if limit is None:
            return False
        if self._lost and not self._consistency.active:
            return True  # what is missing was on its way from the last of them
        return all(
            done >= wanted or worker in self._lost
            for worker, done, wanted in zip(self._workers, self._consistency.progress(), limit)
        )

    @property
    def may_advance(self) -> bool:
        """Whether a step may be completed, also one that waited only for who is missing."""
        return not self._frozen or (self._limit is not None and not self.reached)

    def end(self) -> None:
        """Let what was held back go on."""
        self._frozen = False
        self._limit = None

    def holds(self, worker: int, request: Request) -> bool:
        """Returns whether a request has to wait; it comes back from ``next_held``."""
        waits = self._must_wait(worker, request)
        if waits:
            self._held.append((worker, request))
        return waits

    def next_held(self) -> tuple[int, Request] | None:
        """Returns what has waited longest and need not wait any more, or None."""
        for number, (worker, request) in enumerate(self._held):
            if not self._must_wait(worker, request):
                return self._held.pop(number)
        return None

    def _must_wait(self, worker: int, request: Request) -> bool:
        if not self._frozen or request.kind not in _ADVANCING:
            return False
        return self._limit is None or self._consistency.is_beyond(worker, self._limit)
