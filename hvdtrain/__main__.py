"""The entry point of ``hvdtrain`` and ``python -m hvdtrain``. Ctrl-C ends it quietly."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process and return its exit code."""
    # Signals that are ignored (nohup, a shell's background jobs) stay ignored.
    _replace_handler(signal.default_int_handler, _exit)
    from hvdtrain import cli

    _replace_handler(_exit, signal.default_int_handler)
    code = cli.main()
    _replace_handler(signal.default_int_handler, _exit)
    return code


def _replace_handler(before: Any, after: Any) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
