"""Plain MPI: works on any hosts and is what the two-level engine falls back to."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.deterministic_allreduce import DeterministicAllreduce
from hvdtrain.collectives.engine import Engine, Reduction
from hvdtrain.collectives.failure_detector import FailureDetector
from hvdtrain.collectives.fusion import ALIGNMENT_BYTES, MESSAGE_BYTES, Scratch, pack, unpack
from hvdtrain.collectives.interface import ReduceOp
from hvdtrain.collectives.kernels import accumulator_dtype, combine, finish
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.recovery import Recovery
from hvdtrain.collectives.shared_file import share_file
from hvdtrain.collectives.spin_wait import SpinWait
from hvdtrain.collectives.watchdog import Watchdog
from hvdtrain.errors import MismatchError, Preempted

__all__ = ["MpiCollectives"]

Result = TypeVar("Result")


class MpiCollectives(Engine):
    """Collectives over an MPI communicator.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: All ranks; a duplicate of it is used.
        host: The ranks of ``comm`` that share this one's memory, in the same order.
        chunk_bytes: How much is combined at a time.
        timeout_s: How long to wait for other ranks.
        min_np: Where MPI tells of ranks that die, the others go on without them; where fewer than
            so many are left, ``too_few`` is set. None: a rank that dies ends the job.
        of: The engine of all ranks, where this is one of some of them.
        numbers: Which ranks of ``of`` these are.
    """

    kind = "mpi"

    def __init__(
        self,
        mpi: ModuleType,
        comm: Any,
        host: Any,
        chunk_bytes: int,
        timeout_s: float,
        min_np: int | None = None,
        of: MpiCollectives | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), chunk_bytes, timeout_s)
        self._mpi = mpi
        survives = self.survives_losses = min_np is not None
        if of is not None:
            self.numbers = tuple(of.numbers[rank] for rank in numbers)
            # MPI may take calls of one thread at a time.
            self._lock, self.observers = of._lock, of.observers
        self.alarm: FailureDetector = FailureDetector(
            mpi,
            comm.Dup(),
            timeout_s,
            lambda: self._operations,
            survives,
            self.numbers,
            None if of is None else of.alarm.family,
        )
        self._host = host
        self._timeout_s, self._local_size = timeout_s, host.Get_size()
        first = np.array([self.rank], np.int64)
        host.Bcast(first)
        self._host_first = int(first[0])
        self._patience = SpinWait(self.alarm, timeout_s, self._local_size)
        self._moved_s = 0.0  # when MPI last ended a call that moves data
        self._recovery: Recovery | None = None
        if min_np is not None:
            self._recovery = Recovery(mpi, self, self.alarm, self._patience, min_np, timeout_s)
        self._open(comm, host)
        self.connect(comm.Dup(), self.members)
        self._watchdog = Watchdog(self._inside_mpi, self.number, self.size, timeout_s)
        self._watchdog.start()

    def connect(self, comm: Any, members: Sequence[int]) -> None:
        """Set up all that depends on who the ranks are; collective over ``comm``.

        Args:
            comm: Of this engine alone.
            members: The first numbers of its ranks.
        """
        self.comm = comm
        self.rank, self.size, self.members = comm.Get_rank(), comm.Get_size(), tuple(members)
        self._ordered = DeterministicAllreduce(self._mpi, comm)
        self._scratch = Scratch()
        self._word = np.zeros(2, np.int64)
        self._agreed = np.zeros(2, np.int64)

    def messages(self) -> PointToPoint:
        call = self._calls.get("messages", "", ())

        def attempt() -> PointToPoint:
            self._agree(call)
            # Not the communicator of the operations: their messages must not be taken for others.
            return PointToPoint(
                self._mpi,
                self.comm.Dup(),
                self.members,
                self.alarm,
                self._timeout_s,
                self._local_size,
            )

        return self._operate(call, attempt)

    def share(self, nbytes: int) -> dict[int, np.ndarray]:
        # Whole cache lines: ranks don't write to one another's.
        whole = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        name = "shared memory"
        asked = self.allgather_object([self.member, self._host_first, whole], name=name)
        sizes = {member: size for member, host, size in asked if host == self._host_first}

        def tell(path: str) -> str:
            paths = dict(self.allgather_object([self.member, path], name=name))
            return paths.get(min(sizes), "")

        def agree(mapped: bool) -> bool:
            everyone = self.allgather_object([self.member, mapped], name=name)
            return all(mapped for member, mapped in everyone if member in sizes)

        file = share_file(sum(sizes.values()), self.member == min(sizes), tell, agree)
        return {} if file is None else dict(zip(sizes, file.cut(list(sizes.values()))))

    def confirm(self, call: Call) -> None:
        """Return when every rank holds its result of the operation."""
        self._await(self.comm.Ibarrier(), call)

    def revoke(self) -> None:
        """End whatever any rank waits for on this engine's communicators."""
        self.comm.Revoke()

    def _subset(self, ranks: Sequence[int]) -> MpiCollectives | None:
        color = 0 if self.rank in ranks else self._mpi.UNDEFINED
        comm = self.comm.Split(color, self.rank)
        host = self._host.Split(color, self.rank)
        if self.rank not in ranks:
            return None
        most = comm.allreduce(host.Get_size(), self._mpi.MAX)
        engine = type(self) if most > 1 else MpiCollectives
        return engine(
            self._mpi, comm, host, self._chunk_bytes, self._timeout_s, of=self, numbers=ranks
        )

    def fail(self, reason: str) -> None:
        for alarm in self.alarm.family:
            if alarm is not self.alarm:
                alarm.tell_failure(reason)
        if not self.alarm.fail(reason) and self._recovery is not None:
            # mpirun would let the ranks that don't listen go on, or hang.
            self._end_all(1)

    def _end_all(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)
        raise AssertionError("MPI ends the process")

    def leave(self, code: int = 0) -> None:
        """Wait for the other ranks at the end of the program, then finalise MPI.

        Where one has failed or died MPI is left as it is: finalising would wait for it. So it is
        where this program ends with an exit code that is a failure: the others get a moment to come
        to their end, too, and then what started the ranks sees the code.
        """
        rejoin = self._recovery.rejoin if self._recovery is not None else lambda: None
        for alarm in self.alarm.family:
            if alarm is not self.alarm:
                alarm.tell_end()
        if self._mpi.Is_finalized():
            return
        failing = code not in (0, Preempted.EXIT_CODE)
        if self.alarm.leave(rejoin, failing_code=code if failing else None):
            self._mpi.Finalize()
        elif failing and self._recovery is not None and not self.alarm.failed:
            # The others would take this rank for one that died, and go on.
            self._end_all(code)

    def close(self) -> None:
        super().close()
        self._watchdog.close()

    def _inside_mpi(self) -> tuple[float, str] | None:
        """Since when this rank is in an operation without waiting for others to come."""
        inside = self._inside
        if inside is None or self._patience.waits:
            return None
        return max(inside[0], self._patience.waited_until_s, self._moved_s), inside[1]

    @property
    def _waited_s(self) -> float:
        return self._patience.waited_s

    def _open(self, comm: Any, host: Any) -> None:
        """Set up what stays when ranks die; collective over ``comm``."""

    def _carry_out(self, call: Call, attempt: Callable[[], Result], source: int) -> Result:
        if self._recovery is None:
            return attempt()
        # That ranks differ is a result of the operation, which all are to have, or none.
        found = self._recovery.carry_out(self._operations, call, lambda: _outcome(attempt), source)
        if isinstance(found, MismatchError):
            raise found
        return found

    def _agree(self, call: Call) -> None:
        self._word[0], self._word[1] = call.digest, -call.digest
        self._await(self.comm.Iallreduce(self._word, self._agreed, self._mpi.MAX), call)
        if self._agreed[0] != -self._agreed[1]:
            self._raise_mismatch(call)

    def _await(self, request: Any, call: Call) -> None:
        self._patience.until(request.Test, call.place)

    def _look_for_others(self, place: str, waited_s: float) -> None:
        self.alarm.check(place)
        if waited_s > self._timeout_s:
            self.alarm.time_out(place, self._timeout_s)

    def _allreduce(self, asked: Reduction) -> None:
        self._agree(asked.call)
        dtype = asked.inputs[0].dtype
        for chunk in asked.layout.chunks:
            packed = self._scratch.take("packed", dtype, chunk.items)
            reduced = self._scratch.take("reduced", dtype, chunk.items)
            pack(chunk.pieces, asked.inputs, packed)
            self._ordered.run(packed, reduced, asked.op, self.size)
            self._moved_s = time.monotonic()
            if asked.finite is not None:
                asked.finite.look(reduced)
            unpack(chunk.pieces, reduced, asked.outputs)

    def _gather_words(self, words: np.ndarray) -> np.ndarray:
        everyone = np.zeros((self.size, words.size), np.int64)
        self.comm.Allgather(words, everyone)
        return everyone

    def _gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        byte = self._mpi.BYTE
        if sum(counts) <= MESSAGE_BYTES:
            self.comm.Allgatherv([data, byte], [out, list(counts), byte])
            return
        starts = [0, *np.cumsum(counts)]
        for root, count in enumerate(counts):
            part = out[int(starts[root]) : int(starts[root]) + count]
            if root == self.rank:
                np.copyto(part, data)
            self._broadcast_bytes(part, root)

    def _broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        for start in range(0, buffer.size, MESSAGE_BYTES):
            self.comm.Bcast([buffer[start : start + MESSAGE_BYTES], self._mpi.BYTE], root)
            self._moved_s = time.monotonic()

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
            self._moved_s = time.monotonic()

    def _exchange(
        self, send: np.ndarray, to: int, receive: np.ndarray, source: int, byte: Any
    ) -> None:
        requests = []
        for start in range(0, receive.size, MESSAGE_BYTES):
            block = receive[start : start + MESSAGE_BYTES]
            requests.append(self.comm.Irecv([block, byte], source))
        for start in range(0, send.size, MESSAGE_BYTES):
            requests.append(self.comm.Isend([send[start : start + MESSAGE_BYTES], byte], to))
        self._mpi.Request.Waitall(requests)


def _outcome(attempt: Callable[[], Result]) -> Result | MismatchError:
    try:
        return attempt()
    except MismatchError as error:
        return error


def _slices(buffer: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    starts = [0, *np.cumsum(counts)]
    return [buffer[int(start) : int(start) + count] for start, count in zip(starts, counts)]
