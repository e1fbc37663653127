"""The command ``hvdtrain`` and ``python -m hvdtrain``: Ctrl-C ends both quietly while they load."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

__all__ = ["main"]


def main() -> int:
    """Run the command that this process was started with and return its exit code."""
    # An ignored signal (nohup, a shell's background jobs) stays ignored.
    _replace(signal.default_int_handler, _end)
    from hvdtrain import cli

    _replace(_end, signal.default_int_handler)
    code = cli.main()
    _replace(signal.default_int_handler, _end)
    return code


def _replace(before: Any, after: Any) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
