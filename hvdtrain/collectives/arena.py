"""Where the results of a host's ranks lie, so that each rank can write its share to all of them."""

from __future__ import annotations

import mmap
import resource
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.shared_file import SharedFile, capacity_bytes, share_on_host

__all__ = ["Arena", "open_arena"]


def open_arena(mpi: ModuleType, host: Any) -> Arena | None:
    """The arena of the ranks of ``host``, collective; None where they can't have one."""
    part_bytes = capacity_bytes() // host.Get_size() // mmap.PAGESIZE * mmap.PAGESIZE
    # Addresses are cheap, unless somebody counts them.
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    least = int(host.allreduce(0 if limited else part_bytes, mpi.MIN))
    if least == 0:
        return None
    file = share_on_host(mpi, host, least * host.Get_size(), sparse=True)
    return None if file is None else Arena(file, host.Get_rank(), least)


class Arena:
    """A part of one sparse file for each rank, out of which it takes buffers.

    Args:
        file: Which all of them have mapped.
        seat: Whose part this rank takes buffers from.
        part_bytes: Size of a part, whole pages.
    """

    def __init__(self, file: SharedFile, seat: int, part_bytes: int) -> None:
        self._file = file
        self._first = seat * part_bytes
        self._part_bytes = part_bytes
        self._base = file.array(self._first, 1).ctypes.data
        self._taken: dict[int, int] = {}

    def empty(self, nbytes: int) -> np.ndarray:
        """A flat uint8 array; outside of the arena where that has no room for it."""
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        place = self._gap(whole)
        if place is None or not self._file.claim(self._first + place, whole):
            return np.empty(nbytes, np.uint8)
        self._taken[place] = whole
        return self._file.array(self._first + place, nbytes)

    def drop(self, buffer: np.ndarray) -> None:
        """Give the memory back that ``empty`` gave; nobody reads or writes it any more."""
        place = self.place(buffer)
        if place >= 0:
            self._file.release(self._first + place, self._taken.pop(place))

    def place(self, array: np.ndarray) -> int:
        """Where in this rank's part an array begins, in bytes; -1 if it lies elsewhere."""
        place = array.ctypes.data - self._base
        return place if 0 <= place < self._part_bytes else -1

    def at(self, seat: int, place: int, nbytes: int) -> np.ndarray:
        """What lies at that place in the part of another rank, as flat uint8 array."""
        return self._file.array(seat * self._part_bytes + place, nbytes)

    def _gap(self, nbytes: int) -> int | None:
        """The first place with so many bytes that are not taken."""
        place = 0
        for start, length in sorted(self._taken.items()):
            if start - place >= nbytes:
                return place
            place = start + length
        return place if place + nbytes <= self._part_bytes else None
