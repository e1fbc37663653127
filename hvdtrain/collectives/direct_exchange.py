"""Allgather, broadcast and alltoall of bytes, implemented with point-to-point messages.

MPI's own collectives can't be interrupted. If a rank dies during one of them, Open MPI may hang, or
return without the data. Point-to-point messages, in contrast, report errors, and waits for them
have time-outs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.fusion import messages_of

__all__ = ["DirectExchange"]

# Up to this size, the time depends more on the number of rounds than on the number of bytes.
SMALL_BYTES = 64 << 10
MOST_SEGMENT_BYTES = 256 << 10
SEGMENTS_AHEAD = 8
TAG = 3


class DirectExchange:
    """Exchanges bytes between the ranks of a communicator.

    All ranks must make the same calls. Large data is forwarded along a ring or chain of ranks. Most
    neighbours in the ring or chain are on the same host, so the data crosses each link between
    hosts only once. ``wait`` is a function that waits for a list of requests.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: Any,
        wait: Callable[[list[Any]], None],
        segment_bytes: int = MOST_SEGMENT_BYTES,
    ) -> None:
        self._segment_bytes = min(segment_bytes, MOST_SEGMENT_BYTES)
        self._mpi, self._comm, self._wait = mpi, comm, wait
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()

    def allgather(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate ``counts[r]`` bytes of each rank ``r`` in ``out``."""
        blocks = np.split(out, np.cumsum(counts)[:-1])
        np.copyto(blocks[self._rank], data)
        # Sort the blocks in the order in which this rank receives them.
        blocks = blocks[self._rank :] + blocks[: self._rank]
        if out.size <= SMALL_BYTES:
            self._allgather_doubling(blocks)
        else:
            self._allgather_in_ring(blocks)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Fill the buffers of all ranks with the bytes of ``root``."""
        place = (self._rank - root) % self._size
        if buffer.size <= SMALL_BYTES:
            self._broadcast_in_tree(buffer, root, place)
        else:
            self._broadcast_in_chain(buffer, place)

    def alltoall(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        """Send ``send_counts[r]`` bytes to each rank ``r``, in order from ``data``."""
        sends = np.split(data, np.cumsum(send_counts)[:-1])
        receives = np.split(out, np.cumsum(receive_counts)[:-1])
        np.copyto(receives[self._rank], sends[self._rank])
        for shift in range(1, self._size):
            to, source = (self._rank + shift) % self._size, (self._rank - shift) % self._size
            self._swap([sends[to]], to, [receives[source]], source)

    def _allgather_doubling(self, blocks: Sequence[np.ndarray]) -> None:
        """In every round, double the number of blocks that each rank has (Bruck et al. 1997)."""
        have = 1
        while have < self._size:
            more = min(have, self._size - have)
            to, source = (self._rank - have) % self._size, (self._rank + have) % self._size
            self._swap(blocks[:more], to, blocks[have : have + more], source)
            have += more

    def _allgather_in_ring(self, blocks: Sequence[np.ndarray]) -> None:
        """In each round, send a block to the previous rank, and receive one from the next rank."""
        to, source = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        for sent, received in itertools.pairwise(blocks):
            self._swap([sent], to, [received], source)

    def _broadcast_in_tree(self, buffer: np.ndarray, root: int, place: int) -> None:
        """Double the ranks that have the data in every round. ``place`` is 0 on the root."""
        if not buffer.size:
            return
        reach = 1
        while reach < self._size:
            if reach <= place < 2 * reach:
                self._wait(self._receive(buffer, (root + place - reach) % self._size))
            elif place < reach and place + reach < self._size:
                self._wait(self._send(buffer, (root + place + reach) % self._size))
            reach *= 2

    def _broadcast_in_chain(self, buffer: np.ndarray, place: int) -> None:
        """Forward each segment to the next rank while the following segment is being received."""
        before, after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        nbytes = self._segment_bytes
        segments = [buffer[start : start + nbytes] for start in range(0, buffer.size, nbytes)]
        unrequested = iter(segments)
        receiving: deque[list[Any]] = deque()
        sent: deque[list[Any]] = deque()
        for segment in segments:
            if place > 0:
                batch = itertools.islice(unrequested, SEGMENTS_AHEAD - len(receiving))
                receiving.extend(self._receive(other, before) for other in batch)
                self._wait(receiving.popleft())
            if place < self._size - 1:
                sent.append(self._send(segment, after))
            if len(sent) > SEGMENTS_AHEAD:
                self._wait(sent.popleft())
        self._wait(list(itertools.chain.from_iterable(sent)))

    def _swap(
        self,
        sends: Sequence[np.ndarray],
        to: int,
        receives: Sequence[np.ndarray],
        source: int,
    ) -> None:
        requests = []
        for block in receives:
            requests += self._receive(block, source)
        for block in sends:
            requests += self._send(block, to)
        # Wait for requests one by one, so that the time-out applies to each message.
        for request in requests:
            self._wait([request])

    def _send(self, block: np.ndarray, to: int) -> list[Any]:
        byte = self._mpi.BYTE
        return [self._comm.Isend([part, byte], to, TAG) for part in messages_of(block)]

    def _receive(self, block: np.ndarray, source: int) -> list[Any]:
        byte = self._mpi.BYTE
        return [self._comm.Irecv([part, byte], source, TAG) for part in messages_of(block)]
