"""Limits how often a queue is asked.

One query returns the state of all jobs, and all callers that wait share the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["QueueAnswer", "QueueWatcher"]


@dataclass(frozen=True, kw_only=True)
class QueueAnswer:
    """A queue's answer about all jobs."""

    started_s: float = 0.0  # when the query started, in seconds since 1970
    ended_s: float = 0.0  # when the query ended

    def is_newer_than(self, age_s: float) -> bool:
        """Return whether the answer is at most ``age_s`` seconds old."""
        # The age is negative if the clock was set back.
        return 0 <= time.time() - self.ended_s < age_s


Answer = TypeVar("Answer", bound=QueueAnswer)


class QueueWatcher(Generic[Answer]):
    """Keeps the newest answer of a queue. Several threads may use it at the same time.

    Args:
        ask: Function that asks the queue about all jobs. If the query fails, the failure is an
            answer too.
        interval_s: The shortest time between two queries. A queue that is slow or does not answer
            is asked less often.
    """

    def __init__(self, ask: Callable[[], Answer], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._newest: Answer | None = None

    def answer(self) -> Answer:
        """Return the newest answer. Ask the queue first if this answer is too old."""
        with self._lock:
            newest = self._newest
            if newest is None or not newest.is_newer_than(
                max(self._interval_s, newest.ended_s - newest.started_s)
            ):
                newest = self._newest = self._ask()
            return newest
