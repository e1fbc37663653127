"""Signals that come to ``hvdtrain run``: noted, and acted on where it suits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from hvdtrain.agent.exit_codes import PREEMPTING

__all__ = ["ENDING", "caught_signals"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect the signals that arrive instead of dying of them; undone at the end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # What was ignored when this process started (nohup) stays ignored.
    caught = [
        number for number in (*ENDING, *PREEMPTING) if signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, note) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
