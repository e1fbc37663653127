"""Files in memory that ranks of a host have in common."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import platform
import tempfile
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["SharedFile", "capacity_bytes", "free_bytes", "share_file", "share_on_host"]

# Where MPI libraries keep shared windows; small in many containers.
SHARED_MEMORY = "/dev/shm"


def free_bytes() -> int | None:
    """What is free of the file system that backs shared memory; None if unknown."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    space = os.statvfs(SHARED_MEMORY)
    return space.f_bavail * space.f_frsize


def capacity_bytes() -> int:
    """The size of the file system that backs shared memory; 0 if there is none."""
    if not os.path.isdir(SHARED_MEMORY):
        return 0
    space = os.statvfs(SHARED_MEMORY)
    return space.f_blocks * space.f_frsize


class SharedFile:
    """A file that this process has mapped, and others as well.

    Args:
        file: Its descriptor, which belongs to this object from now on.
        nbytes: Its size.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._memory = mmap.mmap(file, nbytes)
        self._file = file
        weakref.finalize(self, os.close, file)

    def array(self, start: int, nbytes: int) -> np.ndarray:
        """A part of it as flat uint8 array, which owns its references like fresh memory."""
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def cut(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """All of it as flat uint8 arrays of these sizes, one after the other."""
        starts = itertools.accumulate(sizes, initial=0)
        return [self.array(start, size) for start, size in zip(starts, sizes)]

    def claim(self, start: int, nbytes: int) -> bool:
        """Make sure that a part has its space; False where more than half of what is free goes."""
        free = free_bytes()
        if free is None or nbytes > free // 2:
            return False
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError:
            return False
        return True

    def release(self, start: int, nbytes: int) -> None:
        """Give the space of whole pages back, for all who have mapped them."""
        self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)


def share_file(
    nbytes: int,
    first: bool,
    tell: Callable[[str], str],
    agree: Callable[[bool], bool],
    sparse: bool = False,
) -> SharedFile | None:
    """A file that all ranks of the host have mapped; None where that can't be had.

    It has no name any more when this returns, so that it is gone with the last of its users.

    Args:
        nbytes: Its size.
        first: Whether this is the rank that makes the file.
        tell: Gives all ranks of the host what that rank says.
        agree: Whether something is true on all of them.
        sparse: Whether its parts have space only once they are claimed, rather than for certain.
    """
    path = tell(_new_file(nbytes, sparse) if first else "")
    file = _open_file(path, nbytes)
    agreed = agree(file is not None)
    if path:
        # Whoever comes first: the rank that made the file may have died.
        with contextlib.suppress(OSError):
            os.unlink(path)
    return file if agreed else None


def share_on_host(
    mpi: ModuleType, host: Any, nbytes: int, sparse: bool = False
) -> SharedFile | None:
    """``share_file`` for the ranks of a communicator; collective."""
    return share_file(
        nbytes,
        host.Get_rank() == 0,
        lambda path: str(host.bcast(path, 0)),
        lambda opened: bool(host.allreduce(opened, mpi.LAND)),
        sparse,
    )


def _new_file(nbytes: int, sparse: bool) -> str:
    """The path of a file in shared memory; empty where there is none or no space for it."""
    # Elsewhere plain stores may overtake each other, and Python has no fence against that.
    if platform.machine() not in ("x86_64", "AMD64") or not os.path.isdir(SHARED_MEMORY):
        return ""
    try:
        file, path = tempfile.mkstemp(prefix="hvdtrain-", dir=SHARED_MEMORY)
    except OSError:
        return ""
    try:
        if sparse:
            os.truncate(file, nbytes)
        else:
            os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(file)
    return path


def _open_file(path: str, nbytes: int) -> SharedFile | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # ranks of a host may be in containers that share no files
        return None
    try:
        return SharedFile(file, nbytes)
    except OSError:
        os.close(file)
        return None
