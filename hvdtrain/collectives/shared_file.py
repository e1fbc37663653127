"""Files in shared memory, through which the ranks of a host exchange data."""

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

__all__ = [
    "SharedFile",
    "can_share_files",
    "claim_mpi_segments",
    "free_bytes",
    "share_file",
    "share_on_host",
]

# MPI libraries keep shared windows here. It is small in many containers.
SHARED_MEMORY = "/dev/shm"
# Memory is allocated in steps of this size, because on some kernels a signal undoes an allocation
# that is not complete.
CLAIM_BYTES = 16 << 20
# Names of the files in which Open MPI 5 and 4 exchange messages.
MPI_SEGMENTS = ("sm_segment", "vader_segment")


def free_bytes() -> int | None:
    """Return the free space of the shared memory file system, or None if unknown."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    space = os.statvfs(SHARED_MEMORY)
    return space.f_bavail * space.f_frsize


def can_share_files() -> bool:
    """Return whether ranks can exchange data through mapped files."""
    # Processors other than x86 may reorder plain stores, and Python lacks a memory fence.
    return platform.machine() in ("x86_64", "AMD64") and os.path.isdir(SHARED_MEMORY)


def claim_mpi_segments() -> None:
    """Allocate the shared memory that Open MPI uses for messages.

    Open MPI creates sparse files. If a rank wrote to such a file after the file system has become
    full, the rank would get SIGBUS.
    """
    with contextlib.suppress(OSError):
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
        for path in paths:
            if os.path.basename(path).startswith(MPI_SEGMENTS):
                with open(path, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


class SharedFile:
    """A file in shared memory, mapped by this process and others.

    Args:
        descriptor: The open file, which this object closes.
        nbytes: Size of the file.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._memory = mmap.mmap(descriptor, nbytes)
        self._descriptor = descriptor
        # Don't close the file at exit, because exit hooks may still use it.
        weakref.finalize(self, os.close, descriptor).atexit = False

    def hide(self) -> None:
        """Exclude the file from forked children, and from core dumps, which would fill it."""
        self._memory.madvise(mmap.MADV_DONTDUMP)
        self._memory.madvise(mmap.MADV_DONTFORK)

    @property
    def held_bytes(self) -> int:
        """Number of bytes that are allocated."""
        return os.fstat(self._descriptor).st_blocks * 512

    def array(self, start: int, nbytes: int) -> np.ndarray:
        """Return a part of the file as a flat uint8 array, which is the base of all its views."""
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def cut(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return consecutive parts of the file as flat uint8 arrays."""
        starts = itertools.accumulate(sizes, initial=0)
        return [self.array(start, size) for start, size in zip(starts, sizes)]

    def claim(self, start: int, nbytes: int) -> bool:
        """Allocate memory for a part, and return whether that worked."""
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
        """Free the memory of a part that consists of whole pages, for all processes."""
        # Locked pages can't be freed.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)


def share_file(
    sizes: Sequence[int],
    position: int,
    broadcast_path: Callable[[str], str],
    all_true: Callable[[bool], bool],
    sparse: bool = False,
) -> SharedFile | None:
    """Map a file that all ranks of the host share, or return None on all of them.

    All ranks of the host must call this. The result is None if a rank can't map the file or
    allocate its part. The file is unlinked, so that its memory is freed when the last rank has
    closed it.

    Args:
        sizes: Size of each rank's part.
        position: Index of this rank's part. The rank at position 0 creates the file.
        broadcast_path: Function that returns, on every rank, the argument that the rank at position
            0 has passed.
        all_true: Function that returns whether its argument is true on all ranks.
        sparse: Whether to allocate no memory now. Otherwise each rank allocates its own part, so
            that the memory is close to the rank's cores.
    """
    path = broadcast_path(_create_file(sum(sizes)) if position == 0 else "")
    try:
        file = _open_file(path, sum(sizes))
        if file is None:
            ready = False
        elif sparse:
            # If the program locks its memory, the kernel has allocated the whole file.
            ready = not file.held_bytes
        else:
            ready = file.claim(sum(sizes[:position]), sizes[position])
        return file if all_true(ready) else None
    finally:
        if path:
            # Every rank does this, because the rank that created the file may have died.
            with contextlib.suppress(OSError):
                os.unlink(path)


def share_on_host(
    mpi: ModuleType, host: Any, sizes: Sequence[int], sparse: bool = False
) -> SharedFile | None:
    """Call ``share_file`` on all ranks of a communicator, which must all call this."""
    return share_file(
        sizes,
        host.Get_rank(),
        lambda path: str(host.bcast(path, 0)),
        lambda ready: bool(host.allreduce(ready, mpi.LAND)),
        sparse,
    )


def _create_file(nbytes: int) -> str:
    """Create a sparse file in shared memory; return its path, or "" if impossible."""
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
    except OSError:  # the ranks may be in containers that don't share files
        return None
    try:
        return SharedFile(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        return None
