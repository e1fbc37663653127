"""Agreement of ranks on what they call, and allreduce of a small array along with it.

Up to some bytes every rank sends all of the array to every other, and combines all ("one-shot" in
NCCL's and vLLM's terms); above them it sends each the part that this one combines, and then the sum
of its own to all ("two-shot"). Either begins with what is called, so that agreeing takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.collectives.kernels import ReduceOp, reduce_flat
from hvdtrain.collectives.link_speed import Link
from hvdtrain.collectives.spin_wait import SpinWait

__all__ = ["SmallAllreduce", "choose_one_shot_bytes", "most_small_bytes"]

# With more ranks so many messages take longer than a tree's few rounds.
MOST_RANKS = 16
# Of one message. Larger parts are better sent in segments, each while others are reduce_flat.
MOST_BYTES = 32 << 10
HEADER_BYTES = 8
FIRST, SECOND = 5, 6
# No call's digest: the ranks for which this one speaks don't make the same call.
DIFFERENT = -1
NOTHING = np.empty(0, np.uint8)


def most_small_bytes(ranks: int) -> int:
    """The largest array that ``SmallAllreduce`` takes."""
    return MOST_BYTES * ranks if ranks <= MOST_RANKS else 0


def choose_one_shot_bytes(ranks: int, link: Link) -> int:
    """Return up to how many bytes one round is quicker than two.

    With n ranks it sends ``n - 1`` times the array, and two rounds ``2 (n - 1) / n`` times.
    """
    more = (ranks - 1) * (1 - 2 / ranks)
    saved_bytes = link.latency_s * link.bytes_per_s
    return MOST_BYTES if saved_bytes >= MOST_BYTES * more else int(saved_bytes / more)


class SmallAllreduce:
    """Agrees on calls between the ranks of a communicator, and combines small arrays.

    With more than ``MOST_RANKS`` they agree in a tree, and no arrays can be sent.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: What else sends messages there has other tags than ``FIRST`` and ``SECOND``.
        link: What is between the ranks; the same on all of them.
        rank_wait: Waits for ranks that are late.
        data_wait: Waits for messages of ranks that are there.
    """

    def __init__(
        self, mpi: ModuleType, comm: Any, link: Link, rank_wait: SpinWait, data_wait: SpinWait
    ) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank_wait, self._data_wait = rank_wait, data_wait
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._in_tree = self._size > MOST_RANKS
        self._one_shot_bytes = choose_one_shot_bytes(self._size, link)
        if not self._in_tree:
            self._first = _Round(mpi, comm, FIRST)
            self._second = _Round(mpi, comm, SECOND)

    def agree(self, call: Call, alike: bool = True) -> bool:
        """Whether all ranks make this call; all must take part.

        Args:
            call: What this rank calls.
            alike: Whether those for which it speaks make the same.
        """
        digest = call.digest if alike else DIFFERENT
        if self._in_tree:
            return self._agree_in_tree(digest, call)
        self._first.start(digest, [NOTHING])
        return self._all_made_it(call)

    def allreduce(self, call: Call, data: np.ndarray, op: ReduceOp, ranks: int) -> bool:
        """Agree as ``agree`` does, and combine if all do; bitwise equal on all ranks.

        Args:
            call: What this rank calls, and all for which it speaks.
            data: A flat array of at most ``most_small_bytes``; takes the result.
            op: How the ranks' arrays are combined.
            ranks: What ``op="average"`` divides by.
        """
        if data.nbytes <= self._one_shot_bytes:
            self._first.start(call.digest, [data])
            if not self._all_made_it(call):
                return False
            np.copyto(data, reduce_flat(self._first.arrays(data), op, ranks), casting="unsafe")
            return True
        parts = [data[start:stop] for start, stop in split_evenly(data.size, self._size)]
        self._first.start(call.digest, parts)
        if not self._all_made_it(call):
            return False
        mine = parts[self._rank]
        np.copyto(mine, reduce_flat(self._first.arrays(mine), op, ranks), casting="unsafe")
        self._second.start(call.digest, [mine])
        self._data_wait.until(self._second.is_done, call.short_text)
        for rank, part in enumerate(parts):
            part[:] = self._second.array(rank, part)
        return True

    def _all_made_it(self, call: Call) -> bool:
        self._rank_wait.until(self._first.is_done, call.short_text)
        digests = self._first.digests
        return digests[0] != DIFFERENT and digests.count(digests[0]) == self._size

    def _agree_in_tree(self, digest: int, call: Call) -> bool:
        word, most = np.array([digest, -digest]), np.empty(2, np.int64)
        request = self._comm.Iallreduce(word, most, self._mpi.MAX)
        self._rank_wait.until(request.Test, call.short_text)
        return bool(most[0] == -most[1] != DIFFERENT)


class _Round:
    """One message from every rank to every other."""

    def __init__(self, mpi: ModuleType, comm: Any, tag: int) -> None:
        self._mpi, self._comm, self._tag = mpi, comm, tag
        self._rank: int = comm.Get_rank()
        size = comm.Get_size()
        # Everyone begins with another, so that not all send to one.
        self._peers = [(self._rank + step) % size for step in range(1, size)]
        self._sent, self._received = np.empty((2, size, HEADER_BYTES + MOST_BYTES), np.uint8)
        self._sent_words, self._words = (
            messages[:, :HEADER_BYTES].view(np.int64)[:, 0]
            for messages in (self._sent, self._received)
        )
        self._requests: list[Any] = []

    def start(self, digest: int, parts: Sequence[np.ndarray]) -> None:
        """Send a digest to all, and to each rank its part, or the only one; all are copied first.

        Ranks with another digest may send parts of another size.
        """
        messages = []
        self._sent_words[: len(parts)] = digest
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
        """Whether the messages of all ranks are here, and those of this rank are on their way."""
        return bool(self._mpi.Request.Testall(self._requests))

    @property
    def digests(self) -> list[int]:
        """The digests that all ranks have sent, this one too."""
        return list(self._words.tolist())

    def array(self, rank: int, like: np.ndarray) -> np.ndarray:
        """The part that a rank has sent, of the type and size of ``like``."""
        return self._received[rank, HEADER_BYTES : HEADER_BYTES + like.nbytes].view(like.dtype)

    def arrays(self, like: np.ndarray) -> list[np.ndarray]:
        """The parts of all ranks, each of the type and size of ``like``."""
        return [self.array(rank, like) for rank in range(len(self._received))]
