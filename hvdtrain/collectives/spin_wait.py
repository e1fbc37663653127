"""One way to wait for other ranks: spin shortly, then sleep, look for failures, and give up."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.collectives.failure_detector import FailureDetector

__all__ = ["SpinWait"]

# Ranks in step meet within it.
SPIN_S = 100e-6
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 100e-6
# Who has waited for long sleeps for longer: it costs a hundredth of the wait at most, and leaves
# the cores to those that trace or load data meanwhile.
PAUSE_PER_WAITED = 0.01
LAST_PAUSE_S = 10e-3
CHECK_INTERVAL_S = 5e-3
WARNING_INTERVAL_S = 60.0


class SpinWait:
    """Waits for other ranks: spins, then sleeps and looks for failures, up to a time-out.

    Args:
        detector: Looked at while waiting is long.
        timeout_s: After that many seconds waiting is an error.
        spins: Whether each rank has a core; else the rank that is waited for needs this one's.
        needs_all: See ``FailureDetector.check``.
    """

    def __init__(
        self, detector: FailureDetector, timeout_s: float, spins: bool, needs_all: bool = False
    ) -> None:
        self._detector = detector
        self._timeout_s = timeout_s
        self._needs_all = needs_all
        self.patient = False
        """Whether waiting for longer is no error, but logged from time to time."""
        self.waits = False
        """Whether this rank waits here, and will give up by itself."""
        self.waited_until_s = 0.0
        """The time at which the last wait ended, by the monotonic clock."""
        self.waited_s = 0.0
        """The time waited in all, in seconds, but for waits that spinning was enough for."""
        self._spin_s = SPIN_S if spins else 0.0

    def until(self, ready: Callable[[], bool], waiting_in: str) -> None:
        """Return once ``ready()`` is true.

        After some spinning the thread sleeps, which leaves the core and the interpreter to
        whoever the others are waiting for.

        Raises:
            PeerFailedError: Another rank failed or left meanwhile.
            CollectiveTimeoutError: The time is over.
        """
        start_s = now_s = time.monotonic()
        while now_s - start_s <= self._spin_s:
            if ready():
                self.waited_until_s = now_s
                return
            now_s = time.monotonic()
        self.waits = True
        try:
            self._wait(ready, waiting_in)
        finally:
            self.waited_until_s = time.monotonic()
            self.waited_s += self.waited_until_s - start_s
            self.waits = False

    def _wait(self, ready: Callable[[], bool], waiting_in: str) -> None:
        start = time.monotonic()
        next_check = start + CHECK_INTERVAL_S
        next_warning = start + min(self._timeout_s, WARNING_INTERVAL_S)
        pause = FIRST_PAUSE_S
        while not ready():
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
