"""Files in memory that the ranks of a host share."""

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

# Where MPI libraries keep shared windows; small in many containers.
SHARED_MEMORY = "/dev/shm"
# On some kernels a signal undoes an allocation that is not complete.
CLAIM_BYTES = 16 << 20
# The files for messages of Open MPI 5 and 4.
MPI_SEGMENTS = ("sm_segment", "vader_segment")


def free_bytes() -> int | None:
    """Return the free space of the shared memory file system, or None if unknown."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    space = os.statvfs(SHARED_MEMORY)
    return space.f_bavail * space.f_frsize


def can_share_files() -> bool:
    """Return whether ranks can exchange data through mapped files."""
    # Other processors may reorder plain stores, and Python lacks a memory fence.
    return platform.machine() in ("x86_64", "AMD64") and os.path.isdir(SHARED_MEMORY)


def claim_mpi_segments() -> None:
    """Allocate the shared memory that Open MPI uses for messages.

    Open MPI creates sparse files: a rank that writes to one after the file system has become full
    would get SIGBUS.
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
        descriptor: The open file; this object closes it.
        nbytes: Its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._memory = mmap.mmap(descriptor, nbytes)
        self._descriptor = descriptor
        # Not at exit: exit hooks may still use it.
        weakref.finalize(self, os.close, descriptor).atexit = False

    def hide(self) -> None:
        """Exclude the file from core dumps, which would fill a sparse file, and from forks."""
        self._memory.madvise(mmap.MADV_DONTDUMP)
        self._memory.madvise(mmap.MADV_DONTFORK)

    @property
    def held_bytes(self) -> int:
        """The allocated memory."""
        return os.fstat(self._descriptor).st_blocks * 512

    def array(self, start: int, nbytes: int) -> np.ndarray:
        """Return a part of the file as a flat uint8 array, which is the base of all its views."""
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def cut(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return consecutive parts of the file as flat uint8 arrays."""
        starts = itertools.accumulate(sizes, initial=0)
        return [self.array(start, size) for start, size in zip(starts, sizes)]

    def claim(self, start: int, nbytes: int) -> bool:
        """Allocate memory for a part; return whether that worked."""
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
        """Free the memory of whole pages, for all processes."""
        # Not possible for locked pages.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)


def share_file(
    sizes: Sequence[int],
    position: int,
    broadcast_path: Callable[[str], str],
    all_true: Callable[[bool], bool],
    sparse: bool = False,
) -> SharedFile | None:
    """Map a file that all ranks of the host share; None on all of them if that is impossible.

    The file is unlinked, so that its memory is freed with its last user.

    Args:
        sizes: Size of each rank's part.
        position: This rank's part; the rank at position 0 creates the file.
        broadcast_path: Returns the value that it gets on the rank at position 0.
        all_true: Returns whether its argument is true on all ranks.
        sparse: Don't allocate memory now. Otherwise each rank allocates its own part, so that the
            memory is close to its cores.
    """
    path = broadcast_path(_create_file(sum(sizes)) if position == 0 else "")
    try:
        file = _open_file(path, sum(sizes))
        if file is None:
            ready = False
        elif sparse:
            # If the program locks its memory, the whole file is allocated.
            ready = not file.held_bytes
        else:
            ready = file.claim(sum(sizes[:position]), sizes[position])
        return file if all_true(ready) else None
    finally:
        if path:
            # On every rank, as the rank that created the file may have died.
            with contextlib.suppress(OSError):
                os.unlink(path)


def share_on_host(
    mpi: ModuleType, host: Any, sizes: Sequence[int], sparse: bool = False
) -> SharedFile | None:
    """Call ``share_file`` on the ranks of a communicator; collective."""
    return share_file(
        sizes,
        host.Get_rank(),
        lambda path: str(host.bcast(path, 0)),
        lambda ready: bool(host.allreduce(ready, mpi.LAND)),
        sparse,
    )


def _create_file(nbytes: int) -> str:
    """Create a sparse file in shared memory; return its path, or "" if that is impossible."""
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
