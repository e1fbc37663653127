"""The memory that the ranks of a host share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.shared_file import free_bytes, share_on_host

__all__ = ["Window", "ring_slots"]

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

    Window ranks are the ranks of ``host``. They stay what they are when ranks die: the memory of a
    dead rank is still there, and lies fallow.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        host: The ranks that share memory; making a window is collective over them.
        chunk_bytes: Size of a slot.
        away: See ``ring_slots``.
        survives: Whether ranks may die. Open MPI warns that its windows are untested then, so a
            file is mapped where that can be done.
    """

    def __init__(
        self, mpi: ModuleType, host: Any, chunk_bytes: int, away: int = 0, survives: bool = False
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self.slots = _choose_slots(host, chunk_bytes, away)
        slots_bytes = self.slots * chunk_bytes
        sizes = [HEADER_BYTES + slots_bytes] * host.Get_size()
        sizes[0] += slots_bytes  # the results
        self._window: Any = None
        file = share_on_host(mpi, host, sum(sizes)) if survives else None
        if file is not None:
            memory = file.cut(sizes)
        else:
            self._window = mpi.Win.Allocate_shared(sizes[host.Get_rank()], 1, comm=host)
            self._window.Lock_all()
            window_ranks = range(host.Get_size())
            memory = [
                np.frombuffer(self._window.Shared_query(s)[0], np.uint8) for s in window_ranks
            ]
        self._memory = memory
        self.words = [memory[:HEADER_BYTES].data.cast("q") for memory in self._memory]
        self._memory[host.Get_rank()][:] = 0
        self.sync()
        host.Barrier()

    def sync(self) -> None:
        """Set a memory barrier: earlier writes are seen before later ones, and so for reading."""
        if self._window is not None:
            self._window.Sync()

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


def _choose_slots(host: Any, chunk_bytes: int, away: int) -> int:
    """Return how many slots each rank of this host owns; its first rank decides; collective."""
    slots = np.array([ring_slots(host.Get_size(), chunk_bytes, free_bytes(), away)], np.int64)
    host.Bcast(slots)
    return int(slots[0])
