"""Ends a process that hangs inside MPI, or inside Horovod.

What hvdtrain waits for itself has a time-out of its own. Calls of MPI that all ranks make together,
as those that set up a communicator, end when all have made them and offer no way to give up: should
a rank stop just then, or the network, the others would stay in them for ever. Horovod's calls are
all of that kind.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from hvdtrain.errors import CollectiveTimeoutError

__all__ = ["Inside", "Watchdog"]

logger = logging.getLogger(__package__)

# Whoever can give up by itself has done so by then.
MARGIN_S = 10.0
LOOK_S = 1.0
EXIT_CODE = 1

_WHY = {
    "MPI": (
        ", which all ranks had begun: one of them, or the network, stopped in the middle of it."
    ),
    "Horovod": (
        ": another rank does not come to it, or the network has stopped. If the work may take that "
        "long, raise HVDTRAIN_TIMEOUT_S."
    ),
}

Inside = Callable[[], tuple[float, str] | None]


class Watchdog:
    """Looks at where this rank is, about once a second, on a thread of its own.

    Args:
        inside: Since when the rank is in such a call, by the monotonic clock, and in which
            operation; None for nowhere, or where it would give up by itself.
        rank: The number of this rank, for the error.
        size: The number of ranks, for the error.
        timeout_s: How long it may be there; some seconds are added.
        of: Whose calls these are.
    """

    def __init__(
        self, inside: Inside, rank: int, size: int, timeout_s: float, of: str = "MPI"
    ) -> None:
        self._inside = inside
        self._of = of
        self._who = f"rank {rank} of {size}"
        self._limit_s = timeout_s + MARGIN_S
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._look, name="hvdtrain watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            inside = self._inside()
            if inside is not None and time.monotonic() - inside[0] > self._limit_s:
                self._end(inside[1])

    def _end(self, operation: str) -> NoReturn:
        logger.error(
            f"{self._who} failed: {CollectiveTimeoutError.__name__}: it was "
            f"{self._limit_s:.0f} s inside {self._of} in {operation}{_WHY[self._of]} Start the job "
            "again."
        )
        sys.stdout.flush()
        # Neither an exception nor the end of the interpreter would get out of that call.
        os._exit(EXIT_CODE)
