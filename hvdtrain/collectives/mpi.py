"""Plain MPI: works on any hosts and is what the two-level engine falls back to."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.alarm import Alarm
from hvdtrain.collectives.base import ReduceOp
from hvdtrain.collectives.engine import Call, Engine, Reduction
from hvdtrain.collectives.kernels import accumulator_dtype, combine, finish
from hvdtrain.collectives.layout import Scratch, pack, split_evenly, unpack
from hvdtrain.collectives.waiting import Patience
from hvdtrain.errors import MismatchError

__all__ = ["MpiCollectives", "OrderedAllreduce"]

# Up to here sending everything to everyone costs less than a second round.
SMALL_BYTES = 16384
# A message of MPI counts its items in 32 bits.
MESSAGE_BYTES = 1 << 30


class OrderedAllreduce:
    """Allreduce of flat arrays over one communicator, combined in rank order, bitwise equal.

    ``MPI_Allreduce`` promises neither, and knows no bfloat16. Here each rank gets its share of
    every contribution (alltoall), combines it, and gives the result to all (allgather): as many
    bytes as MPI's own ring algorithms. Small arrays go to everyone at once.
    """

    def __init__(self, mpi: ModuleType, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._size: int = comm.Get_size()
        self._rank: int = comm.Get_rank()
        self._scratch = Scratch()

    def run(self, data: np.ndarray, out: np.ndarray, op: ReduceOp, ranks: int) -> None:
        """Combine ``data`` of all ranks into ``out``, both flat and of one type.

        ``ranks`` is what ``op="average"`` divides by.
        """
        wide = accumulator_dtype(data.dtype)
        small = data.nbytes * self._size <= SMALL_BYTES
        parts = ((0, data.size),) * self._size if small else split_evenly(data.size, self._size)
        start, stop = parts[self._rank]
        mine = stop - start
        received = self._scratch.take("received", data.dtype, mine * self._size)
        if small:
            self._allgather_small(data, received)
        else:
            self._alltoall(data, received, parts)
        accumulator = self._scratch.take("accumulator", wide, mine)
        contributions = [received[r * mine : (r + 1) * mine] for r in range(self._size)]
        combine(contributions, op, accumulator, self._scratch.take("widened", wide, mine))
        finish(accumulator, op, ranks)
        np.copyto(out[start:stop], accumulator, casting="unsafe")
        if not small:
            self._allgather_parts(out, parts)

    def _allgather_small(self, data: np.ndarray, received: np.ndarray) -> None:
        byte = self._mpi.BYTE
        self._comm.Allgather([data.view(np.uint8), byte], [received.view(np.uint8), byte])

    def _alltoall(
        self, data: np.ndarray, received: np.ndarray, parts: Sequence[tuple[int, int]]
    ) -> None:
        item, byte = data.dtype.itemsize, self._mpi.BYTE
        start, stop = parts[self._rank]
        mine = (stop - start) * item
        self._comm.Alltoallv(
            [
                data.view(np.uint8),
                [(b - a) * item for a, b in parts],
                [a * item for a, _ in parts],
                byte,
            ],
            [
                received.view(np.uint8),
                [mine] * self._size,
                [r * mine for r in range(self._size)],
                byte,
            ],
        )

    def _allgather_parts(self, out: np.ndarray, parts: Sequence[tuple[int, int]]) -> None:
        item, byte = out.dtype.itemsize, self._mpi.BYTE
        self._comm.Allgatherv(
            self._mpi.IN_PLACE,
            [
                out.view(np.uint8),
                [(b - a) * item for a, b in parts],
                [a * item for a, _ in parts],
                byte,
            ],
        )


class MpiCollectives(Engine):
    """Collectives over an MPI communicator.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: All ranks; a duplicate of it is used.
        host: The ranks of ``comm`` that share this one's memory, in the same order.
        chunk_bytes: How much is combined at a time.
        timeout_s: How long to wait for other ranks.
    """

    kind = "mpi"

    def __init__(
        self, mpi: ModuleType, comm: Any, host: Any, chunk_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), chunk_bytes, timeout_s)
        self._mpi = mpi
        self._comm = comm.Dup()
        self.alarm = Alarm(mpi, comm.Dup(), timeout_s, lambda: self._operations)
        self._patience = Patience(self.alarm, timeout_s, host.Get_size())
        self._ordered = OrderedAllreduce(mpi, self._comm)
        self._scratch = Scratch()
        self._word = np.zeros(2, np.int64)
        self._agreed = np.zeros(2, np.int64)

    def fail(self, reason: str) -> None:
        self.alarm.fail(reason)

    def leave(self) -> None:
        """Wait for the other ranks at the end of the program, then finalise MPI.

        Where one has failed MPI is left as it is: finalising would wait for it.
        """
        if not self._mpi.Is_finalized() and self.alarm.leave():
            self._mpi.Finalize()

    def _agree(self, call: Call) -> None:
        self._word[0], self._word[1] = call.digest, -call.digest
        self._await(self._comm.Iallreduce(self._word, self._agreed, self._mpi.MAX), call)
        if self._agreed[0] != -self._agreed[1]:
            self._raise_mismatch(call)

    def _await(self, request: Any, call: Call) -> None:
        self._patience.until(request.Test, call.place)

    def _raise_mismatch(self, call: Call) -> None:
        data = np.frombuffer(call.text.encode(), np.uint8)
        counts = np.zeros(self.size, np.int64)
        self._comm.Allgather(np.array([data.size], np.int64), counts)
        joined = np.empty(int(counts.sum()), np.uint8)
        self._gather_bytes(data, joined, [int(count) for count in counts])
        ends = np.cumsum(counts)
        ranks_of: dict[str, list[str]] = {}
        for rank, (end, count) in enumerate(zip(ends, counts)):
            text = joined[end - count : end].tobytes().decode()
            ranks_of.setdefault(text, []).append(str(rank))
        letters = enumerate(zip(*ranks_of))
        difference = next((place for place, several in letters if len(set(several)) > 1), 0)
        calls = "; ".join(
            f"rank {', '.join(ranks)}: {_shorten(text, difference)}"
            for text, ranks in ranks_of.items()
        )
        raise MismatchError(
            f"Ranks made different calls at the same point. {calls}. Every rank must make the "
            "same calls with the same names, shapes and types in the same order."
        )

    def _allreduce(self, asked: Reduction) -> None:
        self._agree(asked.call)
        dtype = asked.inputs[0].dtype
        for chunk in asked.layout.chunks:
            packed = self._scratch.take("packed", dtype, chunk.items)
            reduced = self._scratch.take("reduced", dtype, chunk.items)
            pack(chunk.pieces, asked.inputs, packed)
            self._ordered.run(packed, reduced, asked.op, self.size)
            if asked.finite is not None:
                asked.finite.look(reduced)
            unpack(chunk.pieces, reduced, asked.outputs)

    def _exchange_counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        mine = np.array([call.digest, *counts], np.int64)
        everyone = np.zeros((self.size, mine.size), np.int64)
        self._agree(call)
        self._await(self._comm.Iallgather(mine, everyone), call)
        return everyone[:, 1:]

    def _gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        byte = self._mpi.BYTE
        if sum(counts) <= MESSAGE_BYTES:
            self._comm.Allgatherv([data, byte], [out, list(counts), byte])
            return
        starts = [0, *np.cumsum(counts)]
        for root, count in enumerate(counts):
            part = out[int(starts[root]) : int(starts[root]) + count]
            if root == self.rank:
                np.copyto(part, data)
            self._broadcast_bytes(part, root)

    def _broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        for start in range(0, buffer.size, MESSAGE_BYTES):
            self._comm.Bcast([buffer[start : start + MESSAGE_BYTES], self._mpi.BYTE], root)

    def _reduce_scatter(
        self, array: np.ndarray, rows: Sequence[tuple[int, int]], op: ReduceOp
    ) -> np.ndarray:
        start, stop = rows[self.rank]
        counts = [(b - a) * (array.nbytes // max(1, array.shape[0])) for a, b in rows]
        mine = array[start:stop]
        received = np.empty((self.size, mine.size), array.dtype)
        self._alltoall_bytes(
            array.reshape(-1).view(np.uint8),
            counts,
            received.reshape(-1).view(np.uint8),
            [mine.nbytes] * self.size,
        )
        wide = accumulator_dtype(array.dtype)
        total = np.empty(mine.size, wide)
        combine(list(received), op, total, np.empty(mine.size, wide))
        finish(total, op, self.size)
        return total.astype(array.dtype, copy=False).reshape(mine.shape)

    def _alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        sends = _slices(data, send_counts)
        receives = _slices(out, receive_counts)
        np.copyto(receives[self.rank], sends[self.rank])
        byte = self._mpi.BYTE
        for shift in range(1, self.size):
            to, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            self._exchange(sends[to], to, receives[source], source, byte)

    def _exchange(
        self, send: np.ndarray, to: int, receive: np.ndarray, source: int, byte: Any
    ) -> None:
        requests = []
        for start in range(0, receive.size, MESSAGE_BYTES):
            block = receive[start : start + MESSAGE_BYTES]
            requests.append(self._comm.Irecv([block, byte], source))
        for start in range(0, send.size, MESSAGE_BYTES):
            requests.append(self._comm.Isend([send[start : start + MESSAGE_BYTES], byte], to))
        self._mpi.Request.Waitall(requests)


def _slices(buffer: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    starts = [0, *np.cumsum(counts)]
    return [buffer[int(start) : int(start) + count] for start, count in zip(starts, counts)]


def _shorten(text: str, difference: int, limit: int = 300) -> str:
    """The beginning, and where it differs from another text if that is further on."""
    if len(text) <= limit:
        return text
    if difference < limit - 50:
        return f"{text[:limit]} …"
    return f"{text[:150]} … {text[difference - 50 : difference + 100]} …"
