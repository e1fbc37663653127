"""A folder for as long as a process lives, even if that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["PrivateFolder"]

# Between making a folder and locking it.
_YOUNG_S = 60.0


class PrivateFolder:
    """A new folder that its user alone may look into.

    A process that is killed can't remove its folder. So it holds a lock on it, and whoever makes
    the next one removes those that nobody holds.

    Args:
        prefix: The beginning of its name.

    Raises:
        OSError: It can't be made.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._handle = _open(self.path)
        # A file system without locks keeps what is left behind: nobody takes one there.
        with contextlib.suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_abandoned(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{prefix}*"):
        # Other users' can't be opened, and a lock that is held is an error as well.
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            handle = _open(folder)
            stack.callback(os.close, handle)
            about = os.fstat(handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > _YOUNG_S:
                shutil.rmtree(folder)
