"""The log of hvdtrain, through Python's ``logging``: a logger for each package of it.

The logger ``hvdtrain`` has no handler until ``hvdtrain.init()`` or the command gives it the one
below, so importing configures nothing. A program that has given it a handler of its own keeps that
one, and its level; Python's root logger is never touched, and hears nothing of what is shown here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

__all__ = ["LOGGER", "show"]

LOGGER = logging.getLogger("hvdtrain")
_TIME = "%Y-%m-%d %H:%M:%S"


def show(
    level: str,
    *,
    who: str = "hvdtrain: ",
    tag: str = "",
    with_time: bool = False,
    write: Callable[[str], object] | None = None,
) -> None:
    """Show from now on what is logged, unless the program has a handler of its own for that.

    Args:
        level: The least that is shown: debug, info, warning or error.
        who: Before each message.
        tag: Before that, such as the rank.
        with_time: Whether the local time comes first.
        write: Takes each message; if not given they go to the standard error.
    """
    others = [handler for handler in LOGGER.handlers if not isinstance(handler, _Screen)]
    if others and others == LOGGER.handlers:
        return
    handler = _Screen(write or _to_stderr)
    time = "%(asctime)s " if with_time else ""
    handler.setFormatter(logging.Formatter(f"{time}{tag}{who}%(message)s", _TIME))
    LOGGER.handlers = [handler, *others]
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


class _Screen(logging.Handler):
    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)


def _to_stderr(text: str) -> None:
    # Whatever it is by then: programs and tests put others in its place.
    print(text, file=sys.stderr, flush=True)
