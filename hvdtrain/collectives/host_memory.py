"""Memory that the ranks of a host share: a window for exchange, and an arena for results."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.shared_file import (
    SharedFile,
    can_share_files,
    free_bytes,
    share_on_host,
)

__all__ = ["LEAST_SLOTS", "Arena", "Window", "open_arena", "open_window", "ring_slots"]

LEAST_SLOTS = 4
# Total size of a host's slots. Writing to memory that is in another core's cache is far slower,
# unless the cores share that cache. With many slots, a slot has left the caches before it is used
# again.
RING_BYTES = 64 << 20
HEADER_BYTES = 4096
MAP_FIXED = 0x10  # of mmap(2) on Linux


def ring_slots(local_size: int, chunk_bytes: int, free: int | None, away: int = 0) -> int:
    """Return the number of slots per rank that fit into ``RING_BYTES``, at least four.

    The slots use at most half of the ``free`` shared memory, unless four slots need more. ``away``
    is the number of chunks that should be in transfer between hosts at a time.
    """
    turn_bytes = (local_size + 1) * chunk_bytes
    slots = max(LEAST_SLOTS + away, RING_BYTES // turn_bytes)
    if free is not None and slots * turn_bytes > free // 2:
        return LEAST_SLOTS
    return slots


class Window:
    """Shared memory in which each rank of a host has header words and slots.

    A rank's ``window_rank`` is its initial local rank on the host. It never changes, so the memory
    of a lost rank stays unused. The first rank's part of ``memory`` also contains the slots for
    results.
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
        if mpi_window is not None:
            # MPI may create a sparse file. Allocate its memory while there is enough.
            self._memory[window_rank][:] = 0
        self.sync()

    def free(self) -> None:
        """Free the memory.

        All ranks of the host must call this, after they have deleted all views of the memory.
        """
        self._memory.clear()
        self.words.clear()
        if self._mpi_window is not None:
            self._mpi_window.Unlock_all()
            self._mpi_window.Free()

    def sync(self) -> None:
        """Execute a memory barrier for reads and writes."""
        if self._mpi_window is not None:
            self._mpi_window.Sync()

    def clear_words(self, window_rank: int) -> None:
        """Set the header words of a rank to 0."""
        self._memory[window_rank][:HEADER_BYTES] = 0

    def slot(self, window_rank: int, number: int, dtype: np.dtype) -> np.ndarray:
        """Return a slot of a rank as an array with as many whole items as fit."""
        start = HEADER_BYTES + number * self._chunk_bytes
        usable = self._chunk_bytes // dtype.itemsize * dtype.itemsize
        return self._memory[window_rank][start : start + usable].view(dtype)

    def result(self, number: int, dtype: np.dtype) -> np.ndarray:
        """Return the result slot with this number."""
        return self.slot(0, self.slots + number, dtype)


def open_window(mpi: ModuleType, host: Any, chunk_bytes: int, away: int = 0) -> Window | None:
    """Allocate a window on all ranks of the host, or return None on all of them."""
    ranks = host.Get_size()
    # The first rank decides, because the free memory changes all the time.
    slots = int(host.bcast(ring_slots(ranks, chunk_bytes, free_bytes(), away), 0))
    sizes = [HEADER_BYTES + slots * chunk_bytes] * ranks
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
            np.frombuffer(mpi_window.Shared_query(rank)[0], np.uint8) for rank in range(ranks)
        ]
    window = Window(memory, host.Get_rank(), slots, chunk_bytes, mpi_window)
    host.Barrier()
    return window


def _allocate_mpi_window(mpi: ModuleType, host: Any, sizes: Sequence[int]) -> Any:
    """Return an MPI window, or None on all ranks if there is not enough memory."""
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


def open_arena(mpi: ModuleType, host: Any) -> Arena | None:
    """Create the arena of a host, or return None on all ranks if that is impossible.

    All ranks of the host must call this. The parts of all ranks together may grow to half of the
    shared memory that is free now.
    """
    part_bytes = (free_bytes() or 0) // 2 // host.Get_size() // mmap.PAGESIZE * mmap.PAGESIZE
    # The file needs address space for its maximum size.
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        part_bytes = 0
    part_bytes = int(host.allreduce(part_bytes, mpi.MIN))
    if part_bytes == 0:
        return None
    file = share_on_host(mpi, host, [part_bytes] * host.Get_size(), sparse=True)
    if file is None:
        return None
    file.hide()
    return Arena(file, host.Get_rank(), part_bytes)


class Arena:
    """Shared memory for results, in which each rank writes its share to the results of all ranks.

    Results therefore needn't be copied, which would take a quarter of the time of an allreduce. The
    arena is a sparse file with a part for each rank. A rank's ``pool`` takes buffers from its part.

    Forked children don't inherit the file, because they would see later writes of other ranks.
    Instead, they get private copies of the buffers in use, at the same addresses.
    """

    def __init__(self, file: SharedFile, window_rank: int, part_bytes: int) -> None:
        self._file = file
        self._part_start = window_rank * part_bytes
        self._part_bytes = part_bytes
        self._address = file.array(self._part_start, 1).ctypes.data
        self._sizes: dict[int, int] = {}  # the sizes of buffers, by position
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        self.pool = BufferPool(empty=self.empty, drop=self.drop)
        # These hooks can't be unregistered, so they must not keep the arena alive.
        os.register_at_fork(
            before=_weakly(self._copy_buffers),
            after_in_parent=_weakly(self._forget_copies),
            after_in_child=_weakly(self._restore_buffers),
        )

    def close(self) -> None:
        """Drop the pool, so that the memory is freed together with the last result."""
        # The pool and the arena refer to each other, and would wait for the garbage collector.
        self.pool = BufferPool()

    def empty(self, nbytes: int) -> np.ndarray:
        """Allocate a buffer as a flat uint8 array.

        Raises:
            MemoryError: If there is no space for it.
        """
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        place = self._find_gap(size)
        if place is None or not self._file.claim(self._part_start + place, size):
            raise MemoryError(f"The arena is full, got a request for {nbytes} bytes.")
        self._sizes[place] = size
        return self._file.array(self._part_start + place, nbytes)

    def drop(self, buffer: np.ndarray) -> None:
        """Free a buffer."""
        place = self.place(buffer)
        self._file.release(self._part_start + place, self._sizes.pop(place))

    def drop_part(self, window_rank: int) -> None:
        """Free all buffers of a lost rank."""
        self._file.release(window_rank * self._part_bytes, self._part_bytes)

    def place(self, array: np.ndarray) -> int:
        """Return the position of an array in this rank's part, or -1 if it is elsewhere."""
        place = array.ctypes.data - self._address
        return place if 0 <= place < self._part_bytes else -1

    def at(self, window_rank: int, place: int, nbytes: int) -> np.ndarray:
        """Return, as a flat uint8 array, the memory at a position within a rank's part."""
        return self._file.array(window_rank * self._part_bytes + place, nbytes)

    def _find_gap(self, nbytes: int) -> int | None:
        """Return the first unused position with enough space."""
        place = 0
        for start, size in sorted(self._sizes.items()):
            if start - place >= nbytes:
                return place
            place = start + size
        return place if place + nbytes <= self._part_bytes else None

    def _copy_buffers(self) -> None:
        self._copies = [(buffer, buffer.copy()) for buffer in self.pool.held()]

    def _restore_buffers(self) -> None:
        for buffer, copy in self._copies:
            _map_private(buffer.ctypes.data, self._sizes[self.place(buffer)])
            buffer[:] = copy
        self._forget_copies()

    def _forget_copies(self) -> None:
        self._copies = []


def _map_private(address: int, nbytes: int) -> None:
    """Map private memory at an address."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise MemoryError(
            f"Allocating {nbytes} bytes for a result failed: {os.strerror(ctypes.get_errno())}."
        )


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method as long as the method's object exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
