"""A thread in which the collectives of asynchronous operations run, one after another.

All ranks must run the same collectives in the same order. The thread therefore runs them in the
order in which the program starts the operations, never in the order in which tensors become
available.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["CallQueue", "calls"]

Result = TypeVar("Result")


class CallQueue:
    """A queue of calls, which one thread runs in the order in which they were added."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def add(self, call: Callable[[], Result]) -> Future[Result]:
        """Add a call, which runs after all calls that were added before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hvdtrain-calls")
        future = self._thread.submit(call)
        self._last = future
        return future

    def run(self, call: Callable[[], Result]) -> Result:
        """Add a call, wait until it has run, and return its result."""
        if self._last is None or self._last.done():
            return call()  # without a change of threads
        return self.add(call).result()

    def wait(self) -> None:
        """Wait until all calls have run. Each call has its own time-out."""
        if self._last is not None and not self._last.done():
            wait([self._last])


calls = CallQueue()
