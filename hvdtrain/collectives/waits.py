"""Waiting for other ranks, with time-outs."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from hvdtrain.collectives.failure_detector import FailureDetector
from hvdtrain.errors import CollectiveTimeoutError

__all__ = ["SpinWait", "Watchdog"]

logger = logging.getLogger(__package__)

# Ranks that are in step arrive within this time.
SPIN_S = 100e-6
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 100e-6
# Pauses grow in proportion to the time already waited. This makes a wait at most one percent
# longer, and leaves the cores to ranks that trace or load data.
PAUSE_PER_WAITED = 0.01
LAST_PAUSE_S = 10e-3
CHECK_INTERVAL_S = 5e-3
WARNING_INTERVAL_S = 60.0

# The watchdog acts this much later than waits with time-outs.
WATCHDOG_MARGIN_S = 10.0
WATCHDOG_INTERVAL_S = 1.0
EXIT_CODE = 1

_REASONS = {
    "MPI": (
        ". All ranks had started this operation, but one of them, or the network, stopped before "
        "its end."
    ),
    "Horovod": (
        ". Another rank has not started this operation, or the network has stopped. If the work "
        "may take that long, raise HVDTRAIN_TIMEOUT_S."
    ),
}


class SpinWait:
    """Waits for other ranks, with a time-out.

    A wait first spins for a short time. Then it sleeps, and checks periodically whether another
    rank has failed.

    Args:
        spins: Whether waits spin at first. This should be false unless each rank has its own core,
            because spinning would slow other ranks down.
        needs_all: Argument for ``FailureDetector.check``.
    """

    def __init__(
        self, detector: FailureDetector, timeout_s: float, spins: bool, needs_all: bool = False
    ) -> None:
        self._detector = detector
        self._timeout_s = timeout_s
        self._needs_all = needs_all
        self._spin_s = SPIN_S if spins else 0.0
        # Whether the time-out is disabled. Long waits are then logged periodically.
        self.patient = False
        self.is_waiting = False  # whether a wait is in progress and has finished spinning
        self.waited_until_s = 0.0  # end time of the last wait (``time.monotonic()``)
        # total seconds of all waits, not counting waits that ended while spinning
        self.waited_s = 0.0

    def until(self, ready: Callable[[], bool], waiting_in: str) -> None:
        """Return once ``ready()`` is true.

        Raises:
            PeerFailedError: If another rank failed or exited.
            CollectiveTimeoutError: If the wait took too long.
        """
        start_s = now_s = time.monotonic()
        while now_s - start_s <= self._spin_s:
            if ready():
                self.waited_until_s = now_s
                return
            now_s = time.monotonic()
        self.is_waiting = True
        try:
            self._wait(ready, waiting_in)
        finally:
            self.waited_until_s = time.monotonic()
            self.waited_s += self.waited_until_s - start_s
            self.is_waiting = False

    def _wait(self, ready: Callable[[], bool], waiting_in: str) -> None:
        start = time.monotonic()
        next_check = start + CHECK_INTERVAL_S
        next_warning = start + min(self._timeout_s, WARNING_INTERVAL_S)
        pause = FIRST_PAUSE_S
        while not ready():
            # Sleeping releases the core and the interpreter lock.
            time.sleep(pause)
            now = time.monotonic()
            late = min((now - start) * PAUSE_PER_WAITED, LAST_PAUSE_S)
            pause = max(min(pause * 1.25, LONGEST_PAUSE_S), late)
            if now >= next_check:
                next_check = now + CHECK_INTERVAL_S
                self._detector.check(waiting_in, self._needs_all)
                if self.patient:
                    if now >= next_warning:
                        next_warning = now + min(self._timeout_s, WARNING_INTERVAL_S)
                        self._detector.warn_of_wait(waiting_in, now - start)
                elif now - start > self._timeout_s:
                    self._detector.time_out(waiting_in, self._timeout_s)


class Watchdog:
    """Ends the process, from a separate thread, if it hangs in a call to MPI or Horovod.

    hvdtrain's own waits have time-outs. Some MPI calls, such as creating a communicator, return
    only once all ranks have made them, and can't be interrupted. Horovod's calls can't be
    interrupted either.

    ``inside`` is a function that returns the start time (``time.monotonic()``) and the operation of
    the call in progress, or None if no call is in progress. The process ends about ten seconds
    after a call has taken longer than ``timeout_s``.
    """

    def __init__(
        self,
        inside: Callable[[], tuple[float, str] | None],
        rank: int,
        size: int,
        timeout_s: float,
        library: str = "MPI",
    ) -> None:
        self._inside = inside
        self._library = library
        self._rank = f"rank {rank} of {size}"
        self._limit_s = timeout_s + WATCHDOG_MARGIN_S
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="hvdtrain watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(WATCHDOG_INTERVAL_S):
            inside = self._inside()
            if inside is not None and time.monotonic() - inside[0] > self._limit_s:
                self._exit(inside[1])

    def _exit(self, operation: str) -> NoReturn:
        logger.error(
            f"{self._rank} failed: {CollectiveTimeoutError.__name__}: it was "
            f"{self._limit_s:.0f} s inside {self._library} in {operation}"
            f"{_REASONS[self._library]} Start the job again."
        )
        sys.stdout.flush()
        # An exception would not interrupt the call, and neither would the end of the interpreter.
        os._exit(EXIT_CODE)
