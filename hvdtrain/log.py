"""hvdtrain's log, which uses ``logging`` with one logger per package.

Importing hvdtrain configures nothing. ``hvdtrain.init()`` and the command line add a handler to the
logger ``hvdtrain``, unless the program has added its own handler. The root logger is never changed,
and doesn't get the messages that the added handler prints.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

__all__ = ["COMMON", "LOGGER", "configure_log"]

LOGGER = logging.getLogger("hvdtrain")
# For messages that all ranks would print alike. Only the chief prints them.
COMMON = logging.getLogger("hvdtrain.common")


def configure_log(
    level: str,
    *,
    prefix: str = "hvdtrain: ",
    tag: str = "",
    with_time: bool = False,
    is_chief: bool = True,
    write: Callable[[str], object] | None = None,
) -> None:
    """Print log messages from now on, unless the program has its own handler.

    Args:
        level: Minimum level: debug, info, warning or error.
        prefix: Text before each message.
        tag: Text before the prefix, such as the rank.
        with_time: Whether lines start with the local time.
        is_chief: Whether this process prints the messages of ``COMMON``.
        write: Function that is called with each message. By default, messages go to standard error.
    """
    COMMON.disabled = not is_chief
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
    # sys.stderr is looked up for each message, because programs and tests replace it.
    print(text, file=sys.stderr, flush=True)
