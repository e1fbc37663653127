"""Signals by which a cluster says that a job is about to be ended."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["PreemptionSignals"]

_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# What says no more than that time is nearly over, and may say so again.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class PreemptionSignals:
    """Notes such signals from ``catch`` to ``release``, so that a step can be finished and saved.

    Only the main thread may change what a signal does; in another one nothing is caught.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.received = 0
        """The first that came, as a number; 0 for none."""

    def catch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _CAUGHT}

    def release(self, *, handled: bool) -> None:
        """Let signals do what they did before; one that came and was not handled does it now.

        Where it was handled the program is about to end. Another warning, which comes by several
        ways where Slurm and a launcher both tell, must not kill it before it has said how.
        """
        for number, previous in self._previous.items():
            after = signal.SIG_DFL if previous is None else previous
            is_over = handled and number in _WARNINGS and after == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if is_over else after)
        self._previous = {}
        if self.received and not handled:
            os.kill(os.getpid(), self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
