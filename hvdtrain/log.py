"""hvdtrain's log, which uses ``logging`` with one logger per package.

Importing configures nothing: the logger ``hvdtrain`` gets a handler from ``hvdtrain.init()`` or the
command line. If the program has added its own handler, that handler and its level stay. The root
logger is never changed, and doesn't get the messages that are printed here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

__all__ = ["LOGGER", "configure_log"]

LOGGER = logging.getLogger("hvdtrain")


def configure_log(
    level: str,
    *,
    prefix: str = "hvdtrain: ",
    tag: str = "",
    with_time: bool = False,
    write: Callable[[str], object] | None = None,
) -> None:
    """Print log messages from now on, unless the program has its own handler.

    Args:
        level: Minimum level: debug, info, warning or error.
        prefix: Text before each message.
        tag: Text before the prefix, such as the rank.
        with_time: Whether lines start with the local time.
        write: Receives each message instead of standard error.
    """
    others = [handler for handler in LOGGER.handlers if not isinstance(handler, _Handler)]
    if others and others == LOGGER.handlers:
        return
    handler = _Handler(write or _to_stderr)
    time = "%(asctime)s " if with_time else ""
    handler.setFormatter(logging.Formatter(f"{time}{tag}{prefix}%(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers = [handler, *others]
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


class _Handler(logging.Handler):
    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)


def _to_stderr(text: str) -> None:
    # Looked up for each message, as programs and tests replace sys.stderr.
    print(text, file=sys.stderr, flush=True)
