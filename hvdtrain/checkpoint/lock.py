"""A lock that lets one process at a time write into a checkpoint directory.

The process locks the file ``.lock``. The kernel releases the lock when the process ends, even if it
crashes. The content of the file is only used in error messages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from hvdtrain.errors import CheckpointError

__all__ = ["WriteLock", "acquire"]

_NAME = ".lock"
_POLL_S = 0.05
_OWNER_BYTES = 4096

# The errors that file systems without locks return, for example Lustre mounted without `flock`.
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)

_held: weakref.WeakValueDictionary[str, WriteLock] = weakref.WeakValueDictionary()
_guard = threading.Lock()
_watches_forks = False


def acquire(directory: Path, timeout_s: float) -> WriteLock:
    """Return the lock of a directory.

    All callers in this process get the same lock. The lock is released once no object refers to it
    any more.

    Wait up to ``timeout_s`` while another process holds the lock. If it was killed, the kernel may
    be slow to release its lock.

    Raises:
        CheckpointError: If another process holds the lock.
        OSError: If the lock file can't be created.
    """
    global _watches_forks
    key = os.path.realpath(directory)
    with _guard:
        if not _watches_forks:
            os.register_at_fork(after_in_child=_release_in_child)
            _watches_forks = True
        lock = _held.get(key)
        if lock is None or not lock.is_valid():
            lock = _held[key] = WriteLock(directory, timeout_s)
        return lock


class WriteLock:
    """The lock of one directory."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._path = directory / _NAME
        self._descriptor = -1
        self.mutex = threading.Lock()  # a lock between the threads of this process
        # Whether other processes are kept out. It is False if the file system lacks locks.
        self.exclusive = self._acquire(time.monotonic() + timeout_s)

    def is_valid(self) -> bool:
        """Return whether the locked file is still in the directory. Users may have removed it."""
        try:
            return self._descriptor >= 0 and os.path.samestat(
                os.stat(self._path), os.fstat(self._descriptor)
            )
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file. The kernel releases the lock once every process has closed the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def _acquire(self, deadline: float) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            self._descriptor = os.open(self._path, flags, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    return False
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() >= deadline:
                    raise self._conflict() from None
                self.close()
                time.sleep(_POLL_S)
                continue
            if self.is_valid():
                self._write_owner()
                return True
            self.close()

    def _write_owner(self) -> None:
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        with contextlib.suppress(OSError):  # on a full disk, the lock works without this content
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)

    def _conflict(self) -> CheckpointError:
        try:
            content = json.loads(os.pread(self._descriptor, _OWNER_BYTES, 0))
            owner = f"process {int(content['pid'])} on host {str(content['host'])!r}"
        except (OSError, ValueError, TypeError, KeyError):
            owner = "another process"
        return CheckpointError(
            f"{owner} is already writing checkpoints to {self._path.parent}. Choose a separate "
            "directory for each job, or stop that process."
        )


def _release_in_child() -> None:
    """Close all lock files in a forked child, so that the child doesn't hold its parent's locks."""
    global _guard
    _guard = threading.Lock()
    for lock in list(_held.values()):
        lock.close()
    _held.clear()
