"""Locks on files, which the kernel releases when a process ends, however it does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["lock_descriptor", "try_lock"]


def lock_descriptor(descriptor: int) -> bool:
    """Lock an open file; return False if another open file holds the lock.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[int | None]:
    """Hold the lock on a file, which is created if missing; yield None if somebody else holds it.

    Raises:
        OSError: The file can't be opened, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor if lock_descriptor(descriptor) else None
    finally:
        os.close(descriptor)
