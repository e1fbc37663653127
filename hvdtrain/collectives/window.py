"""The memory that the ranks of a host share."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["Window", "map_together", "ring_slots"]

LEAST_SLOTS = 4
# Of all slots of a host. What a rank writes into memory that another has in its cache costs far
# more where the two don't share one; so a slot should have left the caches before its next turn.
RING_BYTES = 96 << 20
# Where MPI libraries keep shared windows; small in many containers.
SHARED_MEMORY = "/dev/shm"
HEADER_BYTES = 4096


def ring_slots(local_size: int, chunk_bytes: int, free_bytes: int | None) -> int:
    """Slots of one rank: as many as a ring of ``RING_BYTES`` holds, and at least four.

    Args:
        local_size: Ranks on the host; one more set of slots holds the results.
        chunk_bytes: Size of a slot.
        free_bytes: Of the file system that backs shared memory, None if unknown. A ring that
            would take more than half of it is made as small as it can be.
    """
    turn_bytes = (local_size + 1) * chunk_bytes
    slots = max(LEAST_SLOTS, RING_BYTES // turn_bytes)
    if free_bytes is not None and slots * turn_bytes > free_bytes // 2:
        return LEAST_SLOTS
    return slots


class Window:
    """Memory of a host: for each rank a header of words and its slots, and the result slots.

    Seats are the ranks of ``host``. They stay what they are when ranks die: the memory of a dead
    rank is still there, and lies fallow.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        host: The ranks that share memory; making a window is collective over them.
        chunk_bytes: Size of a slot.
        survives: Whether ranks may die. Open MPI warns that its windows are untested then, so a
            file is mapped where that can be done.
    """

    def __init__(
        self, mpi: ModuleType, host: Any, chunk_bytes: int, survives: bool = False
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self.slots = _choose_slots(host, chunk_bytes)
        slots_bytes = self.slots * chunk_bytes
        sizes = [HEADER_BYTES + slots_bytes] * host.Get_size()
        sizes[0] += slots_bytes  # the results
        self._window: Any = None
        memory = _map_for(mpi, host, sizes) if survives else None
        if memory is None:
            self._window = mpi.Win.Allocate_shared(sizes[host.Get_rank()], 1, comm=host)
            self._window.Lock_all()
            seats = range(host.Get_size())
            memory = [np.frombuffer(self._window.Shared_query(s)[0], np.uint8) for s in seats]
        self._memory = memory
        self.words = [memory[:HEADER_BYTES].data.cast("q") for memory in self._memory]
        self._memory[host.Get_rank()][:] = 0
        self.sync()
        host.Barrier()

    def sync(self) -> None:
        """What was written before is seen before what is written after, and so for reading."""
        if self._window is not None:
            self._window.Sync()

    def clear_words(self, seat: int) -> None:
        """Set the words of a seat to 0."""
        self._memory[seat][:HEADER_BYTES] = 0

    def slot(self, seat: int, number: int, dtype: np.dtype) -> np.ndarray:
        """A slot of a rank, as so many items as fit."""
        start = HEADER_BYTES + number * self._chunk_bytes
        usable = self._chunk_bytes // dtype.itemsize * dtype.itemsize
        return self._memory[seat][start : start + usable].view(dtype)

    def result(self, number: int, dtype: np.dtype) -> np.ndarray:
        """A slot for results."""
        return self.slot(0, self.slots + number, dtype)


def _choose_slots(host: Any, chunk_bytes: int) -> int:
    """How many slots each rank of this host owns; its first rank decides."""
    free_bytes = None
    if os.path.isdir(SHARED_MEMORY):
        space = os.statvfs(SHARED_MEMORY)
        free_bytes = space.f_bavail * space.f_frsize
    slots = np.array([ring_slots(host.Get_size(), chunk_bytes, free_bytes)], np.int64)
    host.Bcast(slots)
    return int(slots[0])


def map_together(
    sizes: Sequence[int], first: bool, tell: Callable[[str], str], agree: Callable[[bool], bool]
) -> list[np.ndarray] | None:
    """Memory that all ranks of the host see, a part for each; None where that can't be had.

    It is a file that has no name any more when this returns, so that it is gone with the last of
    the ranks.

    Args:
        sizes: Of the parts, in bytes.
        first: Whether this is the rank that makes the file.
        tell: Gives all ranks of the host what that rank says.
        agree: Whether something is true on all of them.
    """
    path = tell(_new_file(sum(sizes)) if first else "")
    memory = _map_file(path, sum(sizes))
    agreed = agree(memory is not None)
    if path:
        # Whoever comes first: the rank that made the file may have died.
        with contextlib.suppress(OSError):
            os.unlink(path)
    if memory is None or not agreed:
        return None
    return np.split(memory, list(itertools.accumulate(sizes))[:-1])


def _map_for(mpi: ModuleType, host: Any, sizes: Sequence[int]) -> list[np.ndarray] | None:
    """``map_together`` for the ranks of a communicator; collective."""
    return map_together(
        sizes,
        host.Get_rank() == 0,
        lambda path: str(host.bcast(path, 0)),
        lambda mapped: bool(host.allreduce(mapped, mpi.LAND)),
    )


def _new_file(nbytes: int) -> str:
    """The path of a file in shared memory that has its space for certain; empty without."""
    # Elsewhere plain stores may overtake each other, and Python has no fence against that.
    if platform.machine() not in ("x86_64", "AMD64") or not os.path.isdir(SHARED_MEMORY):
        return ""
    try:
        file, path = tempfile.mkstemp(prefix="hvdtrain-", dir=SHARED_MEMORY)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(file)
    return path


def _map_file(path: str, nbytes: int) -> np.ndarray | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # ranks of a host may be in containers that share no files
        return None
    try:
        return np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
    except OSError:
        return None
    finally:
        os.close(file)
