"""Allreduce over one communicator, in segments that keep both directions of every link busy.

Each rank owns a part of the array. Of a segment of every part each rank sends the others' to their
owners (reduce-scatter), combines what it gets of its own, and sends the result to all (allgather).
Segments follow one another without waiting, so that one's sums travel while the next one's
contributions do. In all a rank sends ``2 (n - 1) / n`` times the bytes of the array, which is the
least there is (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").

``MPI_Allreduce`` promises neither the same result on all ranks nor the same one each time, and
knows no bfloat16; here contributions are combined in the order of the ranks.

Where arrays cross in a smaller form, what a rank adds itself is not made smaller, as it doesn't
cross; sums are, for the rank that added them up, too, so that all have the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.fusion import Scratch, split_evenly
from hvdtrain.collectives.kernels import ReduceOp, accumulator_dtype, combine, finish_average
from hvdtrain.collectives.wire_format import WireFormat

__all__ = ["DirectAllreduce", "Transfer", "chunks_ahead"]

MOST_AHEAD = 8
MESSAGES_AHEAD = 32
SCATTER, GATHER = 1, 2


def chunks_ahead(ranks: int, chunk_bytes: int, segment_bytes: int) -> int:
    """Return how many chunks to start before the first of them is finished, to keep links busy."""
    segments = max(1, chunk_bytes // ranks // segment_bytes)
    return -(-2 * _segments_ahead(ranks) // segments)


def _segments_ahead(ranks: int) -> int:
    """Return how many segments are on their way to their owners at a time."""
    return min(MOST_AHEAD, max(2, MESSAGES_AHEAD // max(1, ranks - 1)))


@dataclass(eq=False)
class Transfer:
    """One allreduce on its way.

    Attributes:
        data: What this rank adds, as flat array.
        out: Takes the result; may be ``data``.
        op: How the ranks' arrays are combined.
        ranks: What ``op="average"`` divides by.
        wire: How it crosses, if not as it is.
        left: How many of its segments have not arrived.
    """

    data: np.ndarray
    out: np.ndarray
    op: ReduceOp
    ranks: int
    wire: WireFormat | None = None
    left: int = 0

    @property
    def done(self) -> bool:
        """Whether ``out`` holds the result."""
        return self.left == 0

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return values as the bytes that cross: the same memory, where they cross as they are."""
        if self.wire is None:
            return values.view(np.uint8)
        data = np.empty(self.wire.nbytes(values.size), np.uint8)
        self.wire.encode(values, data)
        return data

    def decode(self, data: np.ndarray, values: np.ndarray) -> None:
        """Write what crossed to where it belongs, if it isn't there already."""
        if self.wire is not None:
            self.wire.decode(data, values)


@dataclass(eq=False)
class _Segment:
    """A piece of each rank's part: ``parts[r]`` is where that of rank r lies in the array.

    Attributes:
        requests: Its messages that are under way; they hold the bytes that they send.
        coming: Bytes in a smaller form that they bring, and where what those stand for belongs.
        received: What each rank adds to this one's part.
    """

    transfer: Transfer
    parts: tuple[tuple[int, int], ...]
    requests: list[Any] = field(default_factory=list)
    coming: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    received: list[np.ndarray] = field(default_factory=list)


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

    def start(
        self,
        data: np.ndarray,
        out: np.ndarray,
        op: ReduceOp,
        ranks: int,
        wire: WireFormat | None = None,
    ) -> Transfer:
        """Begin to combine ``data`` of all ranks into ``out``, both flat and of one type.

        Both stay as they are until the transfer is done. With ``wire`` they are float32.
        """
        transfer = Transfer(data, out, op, ranks, wire)
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
        while self._scattering and self._has_come(self._scattering[0][0]):
            segment, slot = self._scattering.popleft()
            self._slots.append(slot)
            self._gather(segment, self._combine(segment))
        while self._gathering and self._has_come(self._gathering[0]):
            self._gathering.popleft().transfer.left -= 1
        while self._waiting and self._slots:
            self._scatter(self._waiting.popleft(), self._slots.popleft())

    def _has_come(self, segment: _Segment) -> bool:
        """Whether a segment's messages are over; if so, puts in place what they have brought."""
        if not self._mpi.Request.Testall(segment.requests):
            return False
        for data, values in segment.coming:
            segment.transfer.decode(data, values)
        segment.requests, segment.coming = [], []
        return True

    def _scatter(self, segment: _Segment, slot: int) -> None:
        """Send each rank this one's contribution to its part; receive those to this one's."""
        data = segment.transfer.data
        start, stop = segment.parts[self._rank]
        mine = stop - start
        rows = self._scratch.take(f"received {slot}", data.dtype, mine * self._size)
        segment.received = [rows[r * mine : (r + 1) * mine] for r in range(self._size)]
        segment.received[self._rank] = data[start:stop]
        if mine:
            for peer in self._peers:
                self._receive(segment, segment.received[peer], peer, SCATTER)
        for peer in self._peers:
            start, stop = segment.parts[peer]
            if stop > start:
                self._send(segment, segment.transfer.encode(data[start:stop]), peer, SCATTER)
        self._scattering.append((segment, slot))

    def _combine(self, segment: _Segment) -> np.ndarray:
        """Write this rank's part of the result; returns it as it is to be sent."""
        transfer = segment.transfer
        start, stop = segment.parts[self._rank]
        wide = accumulator_dtype(transfer.data.dtype)
        # The result may lie where this rank's contribution does.
        total = self._scratch.take("total", wide, stop - start)
        widened = self._scratch.take("widened", wide, stop - start)
        combine(segment.received, transfer.op, total, widened)
        finish_average(total, transfer.op, transfer.ranks)
        mine = transfer.out[start:stop]
        np.copyto(mine, total, casting="unsafe")
        data = transfer.encode(mine)
        transfer.decode(data, mine)
        return data

    def _gather(self, segment: _Segment, mine: np.ndarray) -> None:
        """Send this rank's part of the result to all; receive theirs."""
        for peer in self._peers:
            start, stop = segment.parts[peer]
            if stop > start:
                self._receive(segment, segment.transfer.out[start:stop], peer, GATHER)
        if mine.size:
            for peer in self._peers:
                self._send(segment, mine, peer, GATHER)
        self._gathering.append(segment)

    def _send(self, segment: _Segment, data: np.ndarray, peer: int, tag: int) -> None:
        segment.requests.append(self.comm.Isend([data, self._mpi.BYTE], peer, tag))

    def _receive(self, segment: _Segment, values: np.ndarray, peer: int, tag: int) -> None:
        wire = segment.transfer.wire
        data = values.view(np.uint8)
        if wire is not None:
            data = np.empty(wire.nbytes(values.size), np.uint8)
            segment.coming.append((data, values))
        segment.requests.append(self.comm.Irecv([data, self._mpi.BYTE], peer, tag))
