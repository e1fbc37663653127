"""Allreduce over one communicator, in segments that keep both directions of every link busy.

Each rank owns a part of the array. Of a segment of every part each rank sends the others' to their
owners (reduce-scatter), combines what it gets of its own, and sends the result to all (allgather).
Segments follow one another without waiting, so that one's sums travel while the next one's
contributions do. In all a rank sends ``2 (n - 1) / n`` times the bytes of the array, which is the
least there is (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").

``MPI_Allreduce`` promises neither the same result on all ranks nor the same one each time, and
knows no bfloat16; here contributions are combined in the order of the ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.fusion import Scratch, split_evenly
from hvdtrain.collectives.interface import ReduceOp
from hvdtrain.collectives.kernels import accumulator_dtype, combine, finish

__all__ = ["DirectAllreduce", "Transfer", "chunks_ahead"]

MOST_AHEAD = 8
MESSAGES_AHEAD = 32
SCATTER, GATHER = 1, 2


def chunks_ahead(ranks: int, chunk_bytes: int, segment_bytes: int) -> int:
    """How many chunks to start before the first of them is finished, to keep links busy."""
    segments = max(1, chunk_bytes // ranks // segment_bytes)
    return -(-2 * _segments_ahead(ranks) // segments)


def _segments_ahead(ranks: int) -> int:
    """How many segments are on their way to their owners at a time."""
    return min(MOST_AHEAD, max(2, MESSAGES_AHEAD // max(1, ranks - 1)))


@dataclass(eq=False)
class Transfer:
    """One allreduce on its way.

    Attributes:
        data: What this rank adds, as flat array.
        out: Takes the result; may be ``data``.
        op: How the ranks' arrays are combined.
        ranks: What ``op="average"`` divides by.
        left: How many of its segments have not arrived.
    """

    data: np.ndarray
    out: np.ndarray
    op: ReduceOp
    ranks: int
    left: int = 0

    @property
    def done(self) -> bool:
        """Whether ``out`` holds the result."""
        return self.left == 0


@dataclass(eq=False)
class _Segment:
    """A piece of each rank's part: ``parts[r]`` is where that of rank r lies in the array."""

    transfer: Transfer
    parts: tuple[tuple[int, int], ...]
    received: list[np.ndarray] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)


class DirectAllreduce:
    """Allreduce of flat arrays over one communicator, combined in rank order, bitwise equal.

    All ranks start the same transfers in the same order; each goes on whenever ``progress`` is
    called.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: What else sends messages there has other tags than ``SCATTER`` and ``GATHER``.
        segment_bytes: How much goes to one rank at a time; the same on all ranks.
    """

    def __init__(self, mpi: ModuleType, comm: Any, segment_bytes: int) -> None:
        self._mpi = mpi
        self.comm = comm
        self._segment_bytes = segment_bytes
        self._size: int = comm.Get_size()
        self._rank: int = comm.Get_rank()
        # Everyone begins with another, so that not all send to one.
        self._peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._scratch = Scratch()
        self._slots = deque(range(_segments_ahead(self._size)))
        self._waiting: deque[_Segment] = deque()
        self._scattering: deque[tuple[_Segment, int]] = deque()
        self._gathering: deque[_Segment] = deque()

    def start(self, data: np.ndarray, out: np.ndarray, op: ReduceOp, ranks: int) -> Transfer:
        """Begin to combine ``data`` of all ranks into ``out``, both flat and of one type.

        Both stay as they are until the transfer is done.
        """
        transfer = Transfer(data, out, op, ranks)
        parts = split_evenly(data.size, self._size)
        items = self._segment_bytes // data.dtype.itemsize
        segments = [
            _Segment(transfer, tuple((min(a + at, b), min(a + at + items, b)) for a, b in parts))
            for at in range(0, parts[0][1], items)
        ]
        transfer.left = len(segments)
        self._waiting += segments
        self.progress()
        return transfer

    def progress(self) -> None:
        """Do what can be done of all transfers without waiting."""
        while self._scattering and self._are_over(self._scattering[0][0].requests):
            segment, slot = self._scattering.popleft()
            self._combine(segment)
            self._slots.append(slot)
            self._gather(segment)
        while self._gathering and self._are_over(self._gathering[0].requests):
            self._gathering.popleft().transfer.left -= 1
        while self._waiting and self._slots:
            self._scatter(self._waiting.popleft(), self._slots.popleft())

    def _are_over(self, requests: list[Any]) -> bool:
        return bool(self._mpi.Request.Testall(requests))

    def _scatter(self, segment: _Segment, slot: int) -> None:
        """Send each rank this one's contribution to its part; receive those to this one's."""
        data, byte = segment.transfer.data, self._mpi.BYTE
        start, stop = segment.parts[self._rank]
        mine = stop - start
        rows = self._scratch.take(f"received {slot}", data.dtype, mine * self._size)
        segment.received = [rows[r * mine : (r + 1) * mine] for r in range(self._size)]
        segment.received[self._rank] = data[start:stop]
        if mine:
            segment.requests += [
                self.comm.Irecv([segment.received[peer].view(np.uint8), byte], peer, SCATTER)
                for peer in self._peers
            ]
        for peer in self._peers:
            start, stop = segment.parts[peer]
            if stop > start:
                part = data[start:stop].view(np.uint8)
                segment.requests.append(self.comm.Isend([part, byte], peer, SCATTER))
        self._scattering.append((segment, slot))

    def _combine(self, segment: _Segment) -> None:
        """Write this rank's part of the result."""
        transfer = segment.transfer
        start, stop = segment.parts[self._rank]
        wide = accumulator_dtype(transfer.data.dtype)
        # The result may lie where this rank's contribution does.
        total = self._scratch.take("total", wide, stop - start)
        widened = self._scratch.take("widened", wide, stop - start)
        combine(segment.received, transfer.op, total, widened)
        finish(total, transfer.op, transfer.ranks)
        np.copyto(transfer.out[start:stop], total, casting="unsafe")

    def _gather(self, segment: _Segment) -> None:
        """Send this rank's part of the result to all; receive theirs."""
        out, byte = segment.transfer.out, self._mpi.BYTE
        segment.requests = []
        for peer in self._peers:
            start, stop = segment.parts[peer]
            if stop > start:
                part = out[start:stop].view(np.uint8)
                segment.requests.append(self.comm.Irecv([part, byte], peer, GATHER))
        start, stop = segment.parts[self._rank]
        if stop > start:
            mine = out[start:stop].view(np.uint8)
            segment.requests += [
                self.comm.Isend([mine, byte], peer, GATHER) for peer in self._peers
            ]
        self._gathering.append(segment)
