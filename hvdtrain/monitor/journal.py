"""A file that grows while training goes on, and never ends it."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["Journal"]

logger = logging.getLogger(__package__)


class Journal:
    """Text that is written to a file. When that fails it is told once, and given up.

    Args:
        path: Folders above it are made.
        what: Is written there, for the message.
        flag: Names another file or folder, for the message.
        mode: "a" to go on with a file that there is, "w" to begin anew.
    """

    def __init__(self, path: Path, what: str, flag: str, *, mode: str) -> None:
        self._path, self._what, self._flag = path, what, flag
        self._file: IO[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open(mode, encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def write(self, text: str, *, now: bool = False) -> None:
        """Write more; with ``now`` it is there should this process be killed the next moment."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            if now:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        logger.warning(
            f"can't write {self._what} to {self._path}: {error.strerror or error}. "
            f"Training goes on without. Make room there, or name another one ({self._flag})."
        )
