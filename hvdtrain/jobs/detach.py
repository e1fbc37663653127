"""Starts a program that is nobody's child: ``python -m hvdtrain.jobs.detach program ...``.

Whoever runs this has nothing to wait for later, and the program nothing to lose with it.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Start the program in ``sys.argv`` in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        try:
            os.execvp(sys.argv[1], sys.argv[1:])
        except OSError as error:
            print(f"{sys.argv[1]} can't be started: {error.strerror}", file=sys.stderr)
        finally:
            os._exit(127)


if __name__ == "__main__":
    main()
