"""Files in memory that ranks of a host have in common."""

from __future__ import annotations

import contextlib
import ctypes
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

__all__ = [
    "SharedFile",
    "can_share_files",
    "claim_mpi_segments",
    "free_bytes",
    "share_file",
    "share_on_host",
]

# Where MPI libraries keep shared windows; small in many containers.
SHARED_MEMORY = "/dev/shm"
# On some kernels a signal undoes a claim that is not finished.
CLAIM_BYTES = 16 << 20
MAP_FIXED = 0x10  # of mmap(2), on Linux
# How Open MPI names the files of its messages: version 5, version 4.
MPI_SEGMENTS = ("sm_segment", "vader_segment")


def free_bytes() -> int | None:
    """Return the free bytes of the file system that backs shared memory; None if unknown."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    space = os.statvfs(SHARED_MEMORY)
    return space.f_bavail * space.f_frsize


def can_share_files() -> bool:
    """Return whether ranks can exchange data through files that they have mapped."""
    # Elsewhere plain stores may overtake each other, and Python has no fence against that.
    return platform.machine() in ("x86_64", "AMD64") and os.path.isdir(SHARED_MEMORY)


def claim_mpi_segments() -> None:
    """Allocate the shared memory through which Open MPI sends messages.

    Open MPI leaves it sparse: a rank that writes to it would die of SIGBUS if others had filled the
    file system meanwhile.
    """
    with contextlib.suppress(OSError):
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
        for path in paths:
            if os.path.basename(path).startswith(MPI_SEGMENTS):
                with open(path, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


class SharedFile:
    """A file in shared memory that this process has mapped, and others as well.

    Args:
        descriptor: The open file; belongs to this object from now on.
        nbytes: Its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._memory = mmap.mmap(descriptor, nbytes)
        self._descriptor = descriptor
        # Not at exit: functions that run then may still use it.
        weakref.finalize(self, os.close, descriptor).atexit = False

    def hide(self) -> None:
        """Leave it out of dumps, which would give all of a sparse file its space, and of forks.

        A process that is forked would see what is written later; see ``own``.
        """
        self._memory.madvise(mmap.MADV_DONTDUMP)
        self._memory.madvise(mmap.MADV_DONTFORK)

    def own(self, start: int, nbytes: int) -> None:
        """Give this process, a forked child, its own memory in place of a part of whole pages."""
        place = ctypes.c_void_p(self.array(start, nbytes).ctypes.data)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        mapped = libc.mmap(place, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if mapped != place.value:
            raise MemoryError(f"No {nbytes} bytes for a result: {os.strerror(ctypes.get_errno())}.")

    @property
    def held_bytes(self) -> int:
        """The bytes of it that have space in memory."""
        return os.fstat(self._descriptor).st_blocks * 512

    def array(self, start: int, nbytes: int) -> np.ndarray:
        """A part of it as flat uint8 array, which all views of it refer to as their base."""
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def cut(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """All of it as flat uint8 arrays of these sizes, one after the other."""
        starts = itertools.accumulate(sizes, initial=0)
        return [self.array(start, size) for start, size in zip(starts, sizes)]

    def claim(self, start: int, nbytes: int) -> bool:
        """Make sure that a part has its space; whether that could be done."""
        if nbytes > (free_bytes() or 0):
            return False
        try:
            for block in range(start, start + nbytes, CLAIM_BYTES):
                os.posix_fallocate(
                    self._descriptor, block, min(CLAIM_BYTES, start + nbytes - block)
                )
        except OSError:
            self.release(start, nbytes)
            return False
        return True

    def release(self, start: int, nbytes: int) -> None:
        """Give the space of whole pages back, for all who have mapped them."""
        # Pages that are locked can't be given back.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)


def share_file(
    sizes: Sequence[int],
    position: int,
    tell: Callable[[str], str],
    agree: Callable[[bool], bool],
    sparse: bool = False,
) -> SharedFile | None:
    """A file that all ranks of the host have mapped; None where that can't be had.

    It has no name any more when this returns, so that it is gone with the last of its users.

    Args:
        sizes: Bytes of each rank's part.
        position: Which part is this rank's; the first rank makes the file.
        tell: Gives all ranks of the host what that rank says.
        agree: Whether something is true on all of them.
        sparse: Whether parts have space only once they are claimed. Otherwise each rank claims its
            own now, so that the memory is near its cores.
    """
    path = tell(_new_file(sum(sizes)) if position == 0 else "")
    try:
        file = _open_file(path, sum(sizes))
        if file is None:
            ready = False
        elif sparse:
            # Where the program locks its memory, the whole file has space now.
            ready = not file.held_bytes
        else:
            ready = file.claim(sum(sizes[:position]), sizes[position])
        return file if agree(ready) else None
    finally:
        if path:
            # Whoever comes first: the rank that made the file may have died.
            with contextlib.suppress(OSError):
                os.unlink(path)


def share_on_host(
    mpi: ModuleType, host: Any, sizes: Sequence[int], sparse: bool = False
) -> SharedFile | None:
    """``share_file`` for the ranks of a communicator; collective."""
    return share_file(
        sizes,
        host.Get_rank(),
        lambda path: str(host.bcast(path, 0)),
        lambda opened: bool(host.allreduce(opened, mpi.LAND)),
        sparse,
    )


def _new_file(nbytes: int) -> str:
    """Return the path of a new sparse file in shared memory; empty if there can't be one."""
    if nbytes == 0 or not can_share_files():
        return ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="hvdtrain-", dir=SHARED_MEMORY)
    except OSError:
        return ""
    try:
        os.truncate(descriptor, nbytes)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(descriptor)
    return path


def _open_file(path: str, nbytes: int) -> SharedFile | None:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # ranks of a host may be in containers that share no files
        return None
    try:
        return SharedFile(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        return None
