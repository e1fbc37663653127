"""Allreduce of a small array, together with the check that all ranks made the same call.

Up to a certain size, every rank sends the whole array to every other rank ("one-shot" in NCCL and
vLLM). Larger arrays take two rounds ("two-shot"). In the first, each rank sends every other rank
the part that the other rank reduces. In the second, each rank sends its reduced part to all ranks.
The first round also carries the digest of the call, so that the check takes no extra time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.collectives.kernels import ReduceOp, reduce_flat
from hvdtrain.collectives.tuning import (
    MOST_SMALL_BYTES,
    Link,
    choose_one_shot_bytes,
    most_small_bytes,
)
from hvdtrain.collectives.waits import SpinWait

__all__ = ["SmallAllreduce"]

HEADER_BYTES = 8
FIRST, SECOND = 5, 6
# Sent instead of a digest if the ranks that this rank represents made different calls.
DIFFERENT = -1
NOTHING = np.empty(0, np.uint8)


class SmallAllreduce:
    """Checks that all ranks of a communicator made the same call, and combines small arrays.

    If the communicator has too many ranks for ``allreduce``, ``most_small_bytes`` returns 0, and
    the check uses a tree of ranks. Other messages on the communicator must not use the tags
    ``FIRST`` and ``SECOND``. ``rank_wait`` waits for late ranks, and ``data_wait`` waits for
    messages from ranks that have arrived.
    """

    def __init__(
        self, mpi: ModuleType, comm: Any, link: Link, rank_wait: SpinWait, data_wait: SpinWait
    ) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank_wait, self._data_wait = rank_wait, data_wait
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._in_tree = most_small_bytes(self._size) == 0
        self._one_shot_bytes = choose_one_shot_bytes(self._size, link)
        if not self._in_tree:
            self._first = _Round(mpi, comm, FIRST)
            self._second = _Round(mpi, comm, SECOND)

    def agree(self, call: Call, alike: bool = True) -> bool:
        """Return whether all ranks make the same call.

        All ranks must call this. If this rank represents all ranks of its host, ``alike`` says
        whether these ranks make the same call.
        """
        digest = call.digest if alike else DIFFERENT
        if self._in_tree:
            return self._agree_in_tree(digest, call)
        self._first.start(digest, [NOTHING])
        return self._digests_match(call)

    def allreduce(self, call: Call, data: np.ndarray, op: ReduceOp, ranks: int) -> bool:
        """Combine the arrays if all ranks make the same call, and return whether they do.

        ``data`` is a flat array of at most ``most_small_bytes``. It is replaced by the result,
        which is bitwise identical on all ranks. ``ranks`` is the divisor for ``average``.
        """
        if data.nbytes <= self._one_shot_bytes:
            self._first.start(call.digest, [data])
            if not self._digests_match(call):
                return False
            np.copyto(data, reduce_flat(self._first.arrays(data), op, ranks), casting="unsafe")
            return True
        parts = [data[start:stop] for start, stop in split_evenly(data.size, self._size)]
        self._first.start(call.digest, parts)
        if not self._digests_match(call):
            return False
        own = parts[self._rank]
        np.copyto(own, reduce_flat(self._first.arrays(own), op, ranks), casting="unsafe")
        self._second.start(call.digest, [own])
        self._data_wait.until(self._second.is_done, call.short_text)
        for rank, part in enumerate(parts):
            part[:] = self._second.array(rank, part)
        return True

    def _digests_match(self, call: Call) -> bool:
        self._rank_wait.until(self._first.is_done, call.short_text)
        digests = self._first.digests()
        return digests[0] != DIFFERENT and digests.count(digests[0]) == self._size

    def _agree_in_tree(self, digest: int, call: Call) -> bool:
        own, most = np.array([digest, -digest]), np.empty(2, np.int64)
        request = self._comm.Iallreduce(own, most, self._mpi.MAX)
        self._rank_wait.until(request.Test, call.short_text)
        return bool(most[0] == -most[1] != DIFFERENT)


class _Round:
    """One message from every rank to every other rank."""

    def __init__(self, mpi: ModuleType, comm: Any, tag: int) -> None:
        self._mpi, self._comm, self._tag = mpi, comm, tag
        self._rank: int = comm.Get_rank()
        size = comm.Get_size()
        # Each rank starts with a different peer, so that the ranks don't all send to the same rank.
        self._peers = [(self._rank + step) % size for step in range(1, size)]
        self._sent, self._received = np.empty((2, size, HEADER_BYTES + MOST_SMALL_BYTES), np.uint8)
        self._sent_digests, self._digests = (
            messages[:, :HEADER_BYTES].view(np.int64)[:, 0]
            for messages in (self._sent, self._received)
        )
        self._requests: list[Any] = []

    def start(self, digest: int, parts: Sequence[np.ndarray]) -> None:
        """Send a digest and a part to each rank.

        Pass one part for each rank, or a single part for all ranks. The parts are copied. Ranks
        with a different digest may send parts of a different size.
        """
        messages = []
        self._sent_digests[: len(parts)] = digest
        for row, part in zip(self._sent, parts):
            message = row[: HEADER_BYTES + part.nbytes]
            message[HEADER_BYTES:] = part.view(np.uint8)
            messages.append(message)
        own = messages[self._rank % len(parts)]
        self._received[self._rank, : own.size] = own
        byte, tag = self._mpi.BYTE, self._tag
        self._requests = [
            self._comm.Irecv([self._received[peer], byte], peer, tag) for peer in self._peers
        ]
        self._requests += [
            self._comm.Isend([messages[peer % len(parts)], byte], peer, tag) for peer in self._peers
        ]

    def is_done(self) -> bool:
        """Return whether all messages have been received and sent."""
        return bool(self._mpi.Request.Testall(self._requests))

    def digests(self) -> list[int]:
        """Return the digests of all ranks."""
        return list(self._digests.tolist())

    def array(self, rank: int, like: np.ndarray) -> np.ndarray:
        """Return the part from a rank, in the dtype and size of ``like``."""
        return self._received[rank, HEADER_BYTES : HEADER_BYTES + like.nbytes].view(like.dtype)

    def arrays(self, like: np.ndarray) -> list[np.ndarray]:
        """Return the parts from all ranks, each in the dtype and size of ``like``."""
        return [self.array(rank, like) for rank in range(len(self._received))]
