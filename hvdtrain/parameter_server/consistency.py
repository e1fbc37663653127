"""Rules by which a server decides when to apply gradients and when workers may proceed.

``Asynchronous`` applies each gradient when it arrives. With a bound, it is called stale synchronous
parallel (Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
server"). ``Synchronous`` averages the gradients of a step. With backup workers, it uses only the
gradients that arrive first (Chen et al. 2016, arXiv 1604.00981). ``WorkerLiveness`` tracks which
workers still send requests. The classes of this module do no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hvdtrain.parameter_server.protocol import Kind, Request

__all__ = ["Asynchronous", "Consistency", "ConsistentSnapshot", "Synchronous", "WorkerLiveness"]


class Asynchronous:
    """Applies each gradient when it arrives.

    A worker may be at most ``bound`` steps ahead of the slowest worker. None means no limit.

    Attributes:
        gathers: Whether gradients of several workers are averaged and applied together.
        active: The workers that other workers wait for.
    """

    gathers = False

    def __init__(self, workers: Collection[int], bound: int | None) -> None:
        self.active = set(workers)
        self._pushed = dict.fromkeys(workers, 0)
        self._clocks = dict.fromkeys(workers, 0)  # like _pushed, but raised when a worker rejoins
        self._bound = bound

    def push(self, worker: int, step: int) -> bool:
        """Record that a worker sent a gradient, and return whether the gradient is to be used."""
        self._pushed[worker] += 1
        self._clocks[worker] += 1
        return True

    def complete(self) -> bool:
        """Return whether to apply the gathered gradients now. If so, the next step starts."""
        return False

    def may_proceed(self, worker: int) -> bool:
        """Return whether a worker may receive weights for its next step."""
        return self._bound is None or self._clocks[worker] - self._slowest <= self._bound

    def next_step(self, worker: int) -> int:
        """Return the number of the next step of a worker."""
        return self._pushed[worker]

    def leave(self, worker: int) -> None:
        """Stop waiting for a worker that is done, lost or silent."""
        self.active.discard(worker)

    def rejoin(self, worker: int) -> None:
        """Include a worker again that was excluded because it was silent."""
        self._clocks[worker] = max(self._clocks[worker], self._slowest)
        self.active.add(worker)

    @property
    def _slowest(self) -> int:
        return min((self._clocks[worker] for worker in self.active), default=0)

    def progress(self) -> list[int]:
        """Return this server's progress as one number for each worker.

        The numbers never decrease. If two servers return equal numbers, they have applied the same
        gradients.
        """
        return list(self._pushed.values())

    def would_exceed(self, worker: int, target: Sequence[int]) -> bool:
        """Return whether a request of this worker could raise its ``progress`` above ``target``."""
        return self._pushed[worker] >= target[list(self._pushed).index(worker)]


class Synchronous:
    """Makes all workers complete a step before the next step starts.

    ``wanted`` is the number of gradients to average in a step. The gradients that arrive first are
    used. If ``wanted`` is None, the gradients of all workers are used. The methods are those of
    ``Asynchronous``.
    """

    gathers = True

    def __init__(self, workers: Collection[int], wanted: int | None = None) -> None:
        self.active = set(workers)
        self._size = len(workers)
        self._wanted = self._size if wanted is None else wanted
        self._step = 0
        self._taken: set[int] = set()

    def push(self, worker: int, step: int) -> bool:
        """Record a worker's gradient, and return whether it belongs to the current step."""
        if step != self._step:
            return False
        self._taken.add(worker)
        return True

    def complete(self) -> bool:
        """Return whether all gradients of the step have arrived. If so, the next step starts."""
        # A worker that left after its push still counts.
        waited_for = len(self.active | self._taken)
        if not self._taken or len(self._taken) < min(self._wanted, waited_for):
            return False
        self._step += 1
        self._taken = set()
        return True

    def may_proceed(self, worker: int) -> bool:
        """Return whether a worker may get weights: the step with its last gradient is complete."""
        return worker not in self._taken

    def next_step(self, worker: int) -> int:
        """Return the number of the current step."""
        return self._step

    def leave(self, worker: int) -> None:
        """Stop waiting for a worker that is done, lost or silent."""
        self.active.discard(worker)

    def rejoin(self, worker: int) -> None:
        """Include a worker again that was excluded because it was silent."""
        self.active.add(worker)

    def progress(self) -> list[int]:
        """Return the number of the current step, once for each worker.

        If the job has backup workers, return zeros.
        """
        # With backup workers, each server takes the gradients that arrive at it first. Servers
        # can't wait for equal gradients then, so they report equal progress.
        return [0 if self._wanted < self._size else self._step] * self._size

    def would_exceed(self, worker: int, target: Sequence[int]) -> bool:
        """Return whether another step would raise the progress above ``target``."""
        return self.progress()[0] >= target[0]


Consistency = Asynchronous | Synchronous


class WorkerLiveness:
    """Tracks which workers may still send requests, and which are silent.

    A worker that doesn't send a request within ``silence_s`` after a reply counts as silent until
    its next request. The chief never becomes silent, because it validates and saves checkpoints
    between steps, and because training can't continue without it anyway. A worker is not silent
    before its first step, because that step includes the compilation of the model.
    """

    def __init__(self, workers: Sequence[int], silence_s: float = math.inf) -> None:
        self.connected = set(workers)  # the workers that are neither done nor lost
        self.training = set(workers)  # the workers that may still send gradients
        self.stepped: set[int] = set()  # the workers that have made a step
        self._chief = workers[0]
        self._silence_s = silence_s
        self._replied: dict[int, float] = {}  # time of the last reply; infinity once silent

    def note_request(self, worker: int) -> bool:
        """Record that a worker sent a request, and return whether the worker was silent before."""
        return self._replied.pop(worker, 0.0) == math.inf

    def note_reply(self, worker: int, now: float) -> None:
        """Record a reply to a worker at ``now``, from when its next request is expected."""
        if worker in self.stepped and worker in self.training and worker != self._chief:
            self._replied[worker] = now

    def stop_training(self, worker: int) -> None:
        """Record that a worker will send no more gradients."""
        self.training.discard(worker)
        self._replied.pop(worker, None)

    def disconnect(self, worker: int) -> None:
        """Record that a worker is done or lost."""
        self.stop_training(worker)
        self.connected.discard(worker)

    @property
    def next_silence_s(self) -> float:
        """When the next worker will count as silent; infinity if no request is expected."""
        return min(self._replied.values(), default=math.inf) + self._silence_s

    def mark_silent(self, now: float) -> list[int]:
        """Return the workers that become silent because their requests are overdue at ``now``."""
        silent = [w for w, since in self._replied.items() if now >= since + self._silence_s]
        self._replied.update(dict.fromkeys(silent, math.inf))
        return silent


class ConsistentSnapshot:
    """One server's part in a snapshot in which all servers have applied the same gradients.

    A worker sends each gradient to all servers, but one server may have applied it before another.
    The chief therefore first makes all servers stop applying gradients, and gets their progress:
    for each worker, the number of its gradients that the server has applied. The largest number of
    any server is the target. Every server then applies gradients until it reaches the target, which
    is possible because the missing gradients are already on their way. Later requests wait until
    the snapshot is taken.
    """

    def __init__(self, consistency: Consistency, workers: Sequence[int]) -> None:
        self._consistency = consistency
        self._workers = tuple(workers)
        self._frozen = False
        self._target: Sequence[int] | None = None
        self._held: list[tuple[int, Request]] = []
        self._lost: set[int] = set()

    def drop_worker(self, worker: int) -> None:
        """Stop waiting for a lost worker. Its last gradient may have reached only some servers."""
        self._lost.add(worker)
        self._held = [entry for entry in self._held if entry[0] != worker]

    def freeze(self) -> list[int]:
        """Stop applying gradients until ``resume_to``, and return this server's progress."""
        self._frozen = True
        return self._consistency.progress()

    def resume_to(self, target: Sequence[int]) -> None:
        """Allow this server to apply gradients until its progress is ``target``."""
        self._target = target

    @property
    def reached(self) -> bool:
        """Whether this server's progress has reached the target."""
        target = self._target
        if target is None:
            return False
        if self._lost and not self._consistency.active:
            return True  # only gradients of lost workers are missing
        return all(
            done >= wanted or worker in self._lost
            for worker, done, wanted in zip(self._workers, self._consistency.progress(), target)
        )

    @property
    def may_advance(self) -> bool:
        """Whether the server may apply gradients and start the next step."""
        return not self._frozen or (self._target is not None and not self.reached)

    def finish(self) -> None:
        """End the snapshot. Requests that were held back may be handled now."""
        self._frozen = False
        self._target = None

    def hold(self, worker: int, request: Request) -> bool:
        """Return whether a request must wait for the snapshot; then ``next_held`` returns it."""
        waits = self._must_wait(worker, request)
        if waits:
            self._held.append((worker, request))
        return waits

    def next_held(self) -> tuple[int, Request] | None:
        """Return the oldest stored request that needn't wait any more, or None."""
        for number, (worker, request) in enumerate(self._held):
            if not self._must_wait(worker, request):
                return self._held.pop(number)
        return None

    def _must_wait(self, worker: int, request: Request) -> bool:
        if not self._frozen or request.kind not in (Kind.PUSH, Kind.LEAVE, Kind.END):
            return False
        return self._target is None or self._consistency.would_exceed(worker, self._target)
