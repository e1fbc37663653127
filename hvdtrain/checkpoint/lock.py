"""One process at a time writes into a directory of checkpoints; its death frees the directory.

The lock is the kernel's, on ``.lock`` in the directory, so that nothing is left of it when a
process is killed. What the file says is only for the message.
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

__all__ = ["WriteLock", "hold"]

_NAME = ".lock"
_POLL_S = 0.05
_HOLDER_BYTES = 4096

# A file system without locks says one of these, for example Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)

_held: weakref.WeakValueDictionary[str, WriteLock] = weakref.WeakValueDictionary()
_guard = threading.Lock()
_watches_forks = False


def hold(directory: Path, timeout_s: float) -> WriteLock:
    """Return the lock of a directory, which this process shares until all its users drop it.

    A process that was killed may hold its files for a moment yet: ``timeout_s`` bounds the wait.

    Raises:
        CheckpointError: Another process holds it.
        OSError: The lock file can't be made.
    """
    global _watches_forks
    key = os.path.realpath(directory)
    with _guard:
        if not _watches_forks:
            os.register_at_fork(after_in_child=_forget)
            _watches_forks = True
        lock = _held.get(key)
        if lock is None or not lock.is_valid():
            lock = _held[key] = WriteLock(directory, timeout_s)
        return lock


class WriteLock:
    """The lock of one directory.

    Attributes:
        alone: Whether it is certain that no other process writes there; not where the file system
            knows no locks.
        mutex: For the threads of this process.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._path = directory / _NAME
        self._descriptor = -1
        self.mutex = threading.Lock()
        self.alone = self._take(time.monotonic() + timeout_s)

    def is_valid(self) -> bool:
        """Whether the file that is locked is still the directory's; a user may have removed it."""
        try:
            return self._descriptor >= 0 and os.path.samestat(
                os.stat(self._path), os.fstat(self._descriptor)
            )
        except FileNotFoundError:
            return False

    def forget(self) -> None:
        """Close the file. The lock stays as long as a process has this opening of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = forget

    def _take(self, deadline: float) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            self._descriptor = os.open(self._path, flags, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() >= deadline:
                    raise CheckpointError(self._taken()) from None
                self.forget()
                time.sleep(_POLL_S)
                continue
            if self.is_valid():
                self._sign()
                return True
            self.forget()

    def _sign(self) -> None:
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)

    def _taken(self) -> str:
        try:
            holder = json.loads(os.pread(self._descriptor, _HOLDER_BYTES, 0))
            who = f"process {int(holder['pid'])} on host {str(holder['host'])!r}"
        except (OSError, ValueError, TypeError, KeyError):
            who = "another process"
        return (
            f"{who} writes checkpoints into {self._path.parent} already. Name a directory of its "
            "own for each job, or end that process."
        )


def _forget() -> None:
    """Forget all locks in a forked child: it doesn't write, and must not hold them on its own."""
    global _guard
    _guard = threading.Lock()
    for lock in list(_held.values()):
        lock.forget()
    _held.clear()
