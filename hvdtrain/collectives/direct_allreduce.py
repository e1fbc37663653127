"""Allreduce over one communicator, in segments that keep both directions of every link busy.

Each rank owns a part of the array. For every other part, a rank sends its contribution to the owner
(reduce-scatter). Each rank combines the contributions to its own part, and sends the result to all
ranks (allgather). Parts are cut into segments, so that the sums of one segment are sent at the same
time as the contributions to the next segment. Each rank sends ``2 (n - 1) / n`` times the size of
the array, which is optimal (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").

``MPI_Allreduce`` is not used, because it guarantees neither identical nor reproducible results, and
does not support bfloat16. Here, contributions are combined in rank order.

If a wire format such as float16 is used, contributions and sums are converted to this format before
they are sent. A rank keeps the float32 values of what it contributes to its own part. But the sums
of this part are converted to the wire format and back, so that all ranks get the same result.
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
    """Return how many chunks to start before waiting for the first one, to keep links busy."""
    segments = max(1, chunk_bytes // ranks // segment_bytes)
    return -(-2 * _segments_ahead(ranks) // segments)


def _segments_ahead(ranks: int) -> int:
    """Return the maximum number of segments that are in the reduce-scatter phase at a time."""
    return min(MOST_AHEAD, max(2, MESSAGES_AHEAD // max(1, ranks - 1)))


@dataclass(eq=False)
class Transfer:
    """An allreduce in progress."""

    data: np.ndarray
    out: np.ndarray
    op: ReduceOp
    ranks: int  # the number by which ``average`` divides the sum
    wire: WireFormat | None = None
    left: int = 0  # number of segments that are not complete

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Convert values to the bytes to send. Without a wire format, return a view."""
        if self.wire is None:
            return values.view(np.uint8)
        data = np.empty(self.wire.nbytes(values.size), np.uint8)
        self.wire.encode(values, data)
        return data

    def decode(self, data: np.ndarray, values: np.ndarray) -> None:
        """Convert received bytes to values. Without a wire format, there is nothing to do."""
        if self.wire is not None:
            self.wire.decode(data, values)


@dataclass(eq=False)
class _Segment:
    """A slice of each rank's part of the array. All slices of a segment are sent together.

    The array is divided into one part per rank. ``parts[r]`` is the range of the array that
    contains the slice of rank ``r``'s part.
    """

    transfer: Transfer
    parts: tuple[tuple[int, int], ...]
    requests: list[Any] = field(default_factory=list)
    # Pairs of arrays. The first contains bytes that were received in a wire format, and the second
    # receives the decoded values.
    encoded: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    # contribution of each rank to this rank's slice
    received: list[np.ndarray] = field(default_factory=list)


class DirectAllreduce:
    """Allreduce of flat arrays over one communicator, with bitwise identical results.

    All ranks must start the same transfers in the same order. Transfers advance when ``progress``
    is called. Other messages on the communicator must not use the tags ``SCATTER`` and ``GATHER``.
    """

    def __init__(self, mpi: ModuleType, comm: Any, segment_bytes: int) -> None:
        self._mpi = mpi
        self.comm = comm
        self._segment_bytes = segment_bytes
        self._size: int = comm.Get_size()
        self._rank: int = comm.Get_rank()
        # Each rank starts with a different peer, so that the ranks don't all send to the same rank.
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
        """Start to combine the ``data`` of all ranks in ``out``.

        ``data`` and ``out`` are flat arrays of the same dtype. If ``wire`` is given, the dtype must
        be float32. Don't modify either array until the transfer is done.
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
        """Advance all transfers as far as possible without waiting."""
        while self._scattering and self._is_received(self._scattering[0][0]):
            segment, slot = self._scattering.popleft()
            self._slots.append(slot)
            self._gather(segment, self._combine(segment))
        while self._gathering and self._is_received(self._gathering[0]):
            self._gathering.popleft().transfer.left -= 1
        while self._waiting and self._slots:
            self._scatter(self._waiting.popleft(), self._slots.popleft())

    def _is_received(self, segment: _Segment) -> bool:
        """Return whether all messages of a segment have arrived. If they have, decode them."""
        if not self._mpi.Request.Testall(segment.requests):
            return False
        for data, values in segment.encoded:
            segment.transfer.decode(data, values)
        segment.requests, segment.encoded = [], []
        return True

    def _scatter(self, segment: _Segment, slot: int) -> None:
        """Send contributions to the other ranks, and receive contributions to this rank's part."""
        data = segment.transfer.data
        start, stop = segment.parts[self._rank]
        items = stop - start
        rows = self._scratch.take(f"received {slot}", data.dtype, items * self._size)
        segment.received = [rows[r * items : (r + 1) * items] for r in range(self._size)]
        segment.received[self._rank] = data[start:stop]
        if items:
            for peer in self._peers:
                self._receive(segment, segment.received[peer], peer, SCATTER)
        for peer in self._peers:
            start, stop = segment.parts[peer]
            if stop > start:
                self._send(segment, segment.transfer.encode(data[start:stop]), peer, SCATTER)
        self._scattering.append((segment, slot))

    def _combine(self, segment: _Segment) -> np.ndarray:
        """Combine the contributions to this rank's part, and return the bytes to send."""
        transfer = segment.transfer
        start, stop = segment.parts[self._rank]
        wide = accumulator_dtype(transfer.data.dtype)
        # The total needs its own buffer, because the output may overlap this rank's contribution.
        total = self._scratch.take("total", wide, stop - start)
        widened = self._scratch.take("widened", wide, stop - start)
        combine(segment.received, transfer.op, total, widened)
        finish_average(total, transfer.op, transfer.ranks)
        part = transfer.out[start:stop]
        np.copyto(part, total, casting="unsafe")
        data = transfer.encode(part)
        transfer.decode(data, part)
        return data

    def _gather(self, segment: _Segment, data: np.ndarray) -> None:
        """Send this rank's part of the result to all ranks, and receive the other parts."""
        for peer in self._peers:
            start, stop = segment.parts[peer]
            if stop > start:
                self._receive(segment, segment.transfer.out[start:stop], peer, GATHER)
        if data.size:
            for peer in self._peers:
                self._send(segment, data, peer, GATHER)
        self._gathering.append(segment)

    def _send(self, segment: _Segment, data: np.ndarray, peer: int, tag: int) -> None:
        segment.requests.append(self.comm.Isend([data, self._mpi.BYTE], peer, tag))

    def _receive(self, segment: _Segment, values: np.ndarray, peer: int, tag: int) -> None:
        wire = segment.transfer.wire
        data = values.view(np.uint8)
        if wire is not None:
            data = np.empty(wire.nbytes(values.size), np.uint8)
            segment.encoded.append((data, values))
        segment.requests.append(self.comm.Irecv([data, self._mpi.BYTE], peer, tag))
