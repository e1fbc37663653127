"""A file that is written during training. Errors never interrupt the training."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["Journal"]

logger = logging.getLogger(__package__)


class Journal:
    """A text file. After the first error it logs a warning and ignores all further text.

    ``what`` describes the content in the warning, and ``flag`` is the option that sets the path.
    ``mode`` is "a" to append to a file, or "w" to replace it.
    """

    def __init__(self, path: Path, what: str, flag: str, *, mode: str) -> None:
        self._path, self._what, self._flag = path, what, flag
        self._file: IO[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open(mode, encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def write(self, text: str, *, flush: bool = False) -> None:
        """Write text. If ``flush`` is true, the text is kept even if this process is killed."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            if flush:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
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
            f"can't write {self._what} to {self._path}: {error.strerror or error}. Training "
            f"continues without it. Free disk space or choose another path ({self._flag})."
        )
