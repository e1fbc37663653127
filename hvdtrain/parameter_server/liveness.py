"""Which workers a server still has, and whether they are heard; pure bookkeeping of one server."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["WorkerLiveness"]


class WorkerLiveness:
    """Who may still send something.

    A worker that has an answer is expected to speak again. One that takes longer than ``silence_s``
    is silent until it does, but for the chief: it validates and saves in between, and without it
    nothing goes on anyway. So does the first step, which comes with the compilation of the model.

    Args:
        workers: By rank; the first is the chief.
        silence_s: How long a worker may take for a step.
    """

    def __init__(self, workers: Sequence[int], silence_s: float = math.inf) -> None:
        self._chief = workers[0]
        self._silence_s = silence_s
        self.there = set(workers)
        """Who has not said that it is done."""
        self.training = set(workers)
        """Who may still send gradients."""
        self._stepped: set[int] = set()
        self._expected: dict[int, float] = {}  # since when
        self._silent: set[int] = set()

    def hear(self, worker: int) -> bool:
        """Note that a worker speaks; whether it had been silent."""
        self._expected.pop(worker, None)
        was_silent = worker in self._silent
        self._silent.discard(worker)
        return was_silent

    def note_step(self, worker: int) -> None:
        """Note that a worker has made a step."""
        self._stepped.add(worker)

    def answer(self, worker: int, now: float) -> None:
        """Note that a worker got its answer; ``now`` by a monotonic clock."""
        if worker in self._stepped and worker in self.training and worker != self._chief:
            self._expected[worker] = now

    def stop_training(self, worker: int) -> None:
        """Note that a worker sends no gradients any more."""
        self.training.discard(worker)
        self._expected.pop(worker, None)
        self._silent.discard(worker)

    def end(self, worker: int) -> None:
        """Note that nothing more comes from a worker: it is done, or died."""
        self.stop_training(worker)
        self.there.discard(worker)

    @property
    def next_silence(self) -> float:
        """When the next worker falls silent, if it says nothing."""
        return min(self._expected.values(), default=math.inf) + self._silence_s

    def fall_silent(self, now: float) -> list[int]:
        """The workers that are silent from now on."""
        silent = [w for w, since in self._expected.items() if now >= since + self._silence_s]
        for worker in silent:
            del self._expected[worker]
        self._silent.update(silent)
        return silent
