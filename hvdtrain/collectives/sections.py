"""Sections: parts of a program that all ranks begin together and leave together, even by an error.

A rank that leaves a section because of an error makes a last call, which differs from every call of
the other ranks and carries the reason. They raise an error with it, and leave the section as well.
All ranks are then at the same point again: a program that catches the error may continue.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

__all__ = ["RAISED", "RanksRaised", "place_of", "reason_of", "warn_if_late"]

logger = logging.getLogger(__package__)

# The kind of the call by which a rank leaves a section after an error.
RAISED = "raised"
PACKAGE = str(Path(__file__).parents[1])
LATE_S = 5.0


class RanksRaised(Exception):
    """Some ranks leave the section by an error; raised on all ranks alike.

    Args:
        reasons: The errors of these ranks, by the numbers that errors call them.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.text = "; ".join(f"rank {rank} failed: {text}" for rank, text in reasons.items())
        super().__init__(self.text)


def reason_of(error: BaseException) -> str:
    """Describe an error for other ranks: type, message, and the user's own line."""
    return f"{type(error).__name__}: {error}{place_of(error.__traceback__)}"[:2000]


def place_of(trace: TracebackType | None) -> str:
    """Return the last line of the user's own program, which says more than those of libraries."""
    frames = traceback.extract_tb(trace)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not frame.filename.startswith(PACKAGE)
    ]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f" ({frame.filename}:{frame.lineno})"


@contextmanager
def warn_if_late(text: str) -> Iterator[None]:
    """Log a warning if the block takes longer than a few seconds."""
    timer = threading.Timer(LATE_S, logger.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
