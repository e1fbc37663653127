"""The memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.shared_file import can_share_files, free_bytes, share_on_host

__all__ = ["Window", "open_window", "ring_slots"]

LEAST_SLOTS = 4
# Of all slots of a host. What a rank writes into memory that another has in its cache costs far
# more where the two don't share one; so a slot should have left the caches before its next turn.
RING_BYTES = 64 << 20
HEADER_BYTES = 4096


def ring_slots(local_size: int, chunk_bytes: int, free: int | None, away: int = 0) -> int:
    """Slots of one rank: as many as a ring of ``RING_BYTES`` holds, and at least four.

    Args:
        local_size: Ranks on the host; one more set of slots holds the results.
        chunk_bytes: Size of a slot.
        free: Bytes of the file system that backs shared memory, None if unknown. A ring that
            would take more than half of it is made as small as it can be.
        away: How many chunks are to be on their way between hosts beside those four.
    """
    turn_bytes = (local_size + 1) * chunk_bytes
    slots = max(LEAST_SLOTS + away, RING_BYTES // turn_bytes)
    if free is not None and slots * turn_bytes > free // 2:
        return LEAST_SLOTS
    return slots


class Window:
    """Memory of a host: for each rank a header of words and its slots, and the result slots.

    Window ranks are the ranks of the host. They stay the same when ranks die: the memory of a dead
    rank is unused.

    Args:
        memory: The part of each rank; the first one also has the results.
        window_rank: This rank.
        slots: Slots of one rank.
        chunk_bytes: Size of a slot.
        mpi_window: MPI's window, if the memory belongs to one.
    """

    def __init__(
        self,
        memory: Sequence[np.ndarray],
        window_rank: int,
        slots: int,
        chunk_bytes: int,
        mpi_window: Any = None,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._memory = list(memory)
        self._mpi_window = mpi_window
        self.slots = slots
        self.words = [part[:HEADER_BYTES].data.cast("q") for part in memory]
        self._memory[window_rank][:] = 0
        self.sync()

    def free(self) -> None:
        """Free the memory once nobody holds views of it; collective."""
        self._memory.clear()
        self.words.clear()
        if self._mpi_window is not None:
            self._mpi_window.Unlock_all()
            self._mpi_window.Free()

    def sync(self) -> None:
        """Set a memory barrier: earlier writes are seen before later ones, and so for reading."""
        if self._mpi_window is not None:
            self._mpi_window.Sync()

    def clear_words(self, window_rank: int) -> None:
        """Set one rank's words to 0."""
        self._memory[window_rank][:HEADER_BYTES] = 0

    def slot(self, window_rank: int, number: int, dtype: np.dtype) -> np.ndarray:
        """A slot of a rank, as so many items as fit."""
        start = HEADER_BYTES + number * self._chunk_bytes
        usable = self._chunk_bytes // dtype.itemsize * dtype.itemsize
        return self._memory[window_rank][start : start + usable].view(dtype)

    def result(self, number: int, dtype: np.dtype) -> np.ndarray:
        """A slot for results."""
        return self.slot(0, self.slots + number, dtype)


def open_window(mpi: ModuleType, host: Any, chunk_bytes: int, away: int = 0) -> Window | None:
    """Return memory that the ranks of a host share; None on all of them if it can't be had.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        host: The ranks; collective over them.
        chunk_bytes: Size of a slot.
        away: See ``ring_slots``.
    """
    slots = _choose_slots(host, chunk_bytes, away)
    sizes = [HEADER_BYTES + slots * chunk_bytes] * host.Get_size()
    sizes[0] += slots * chunk_bytes  # the results
    mpi_window = None
    file = share_on_host(mpi, host, sizes)
    if file is not None:
        memory = file.cut(sizes)
    elif can_share_files():
        return None
    else:
        mpi_window = _allocate_mpi_window(mpi, host, sizes)
        if mpi_window is None:
            return None
        memory = [
            np.frombuffer(mpi_window.Shared_query(rank)[0], np.uint8) for rank in range(len(sizes))
        ]
    window = Window(memory, host.Get_rank(), slots, chunk_bytes, mpi_window)
    host.Barrier()
    return window


def _allocate_mpi_window(mpi: ModuleType, host: Any, sizes: Sequence[int]) -> Any:
    """Return a window of MPI; None on all ranks if there is no room for it."""
    free = free_bytes()
    if not host.allreduce(free is None or free >= sum(sizes), mpi.LAND):
        return None
    try:
        window = mpi.Win.Allocate_shared(sizes[host.Get_rank()], 1, comm=host)
    except mpi.Exception:
        window = None
    if not host.allreduce(window is not None, mpi.LAND):
        return None
    window.Lock_all()
    return window


def _choose_slots(host: Any, chunk_bytes: int, away: int) -> int:
    """Return how many slots each rank of this host owns; its first rank decides; collective."""
    slots = np.array([ring_slots(host.Get_size(), chunk_bytes, free_bytes(), away)], np.int64)
    host.Bcast(slots)
    return int(slots[0])
