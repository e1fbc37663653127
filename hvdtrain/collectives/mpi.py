"""Plain MPI: works on any hosts, and does for shared memory what that does not do itself."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from hvdtrain.cluster.placement import core_numbers
from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.direct_allreduce import DirectAllreduce, Transfer, chunks_ahead
from hvdtrain.collectives.direct_exchange import DirectExchange
from hvdtrain.collectives.failure_detector import FailureDetector
from hvdtrain.collectives.fusion import Chunk, Scratch, pack, unpack
from hvdtrain.collectives.hierarchy import CHUNK_BYTES, choose_chunk_bytes
from hvdtrain.collectives.kernels import accumulator_dtype
from hvdtrain.collectives.link_speed import (
    Link,
    choose_bucket_bytes,
    choose_segment_bytes,
    measure_link,
)
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.recovery import Recovery
from hvdtrain.collectives.small_allreduce import (
    SmallAllreduce,
    choose_one_shot_bytes,
    most_small_bytes,
)
from hvdtrain.collectives.spin_wait import SpinWait
from hvdtrain.collectives.transport import RankState, Reduction, Transport
from hvdtrain.collectives.watchdog import Watchdog
from hvdtrain.errors import Preempted

__all__ = ["MpiTransport"]

logger = logging.getLogger(__name__)


class MpiTransport(Transport):
    """Moves bytes over an MPI communicator.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: All ranks; a duplicate of it is used.
        host: The ranks of ``comm`` that share this one's memory, in the same order.
        chunk_bytes: How much is combined at a time; None to choose.
        timeout_s: How long to wait for other ranks.
        min_np: Where MPI tells of ranks that die, the others go on without them; where fewer than
            so many are left, ``too_few`` is set. None: a rank that dies ends the job.
        parent: The transport of all ranks, where this is one of some of them.
        numbers: The numbers of these ranks in the job, where they are some of its ranks.
        bucket_bytes: See ``Transport``; None to choose.
    """

    kind = "mpi"
    _turns = 1
    """The chunks for which a rank sends as many messages as for one."""

    def __init__(
        self,
        mpi: ModuleType,
        comm: Any,
        host: Any,
        chunk_bytes: int | None,
        timeout_s: float,
        min_np: int | None = None,
        parent: MpiTransport | None = None,
        numbers: Sequence[int] | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__(chunk_bytes or CHUNK_BYTES, timeout_s)
        self._chooses_chunks = chunk_bytes is None
        self._arguments = mpi, comm, host, chunk_bytes, timeout_s, min_np, parent, numbers
        self._asked_bucket_bytes = bucket_bytes
        self._mpi = mpi
        self._all, self._host = comm, host
        self._local_size = host.Get_size()
        self._min_np = min_np
        self._parent, self._numbers = parent, numbers

    def open(self, ranks: RankState) -> Transport:
        super().open(ranks)
        comm = self._all
        ranks.set_ranks(comm.Get_rank(), comm.Get_size(), self._numbers)
        ranks.survives_losses = self._min_np is not None
        first = np.array([ranks.rank], np.int64)
        self._host.Bcast(first)
        self.host = int(first[0])
        host_of = np.zeros(ranks.size, np.int64)
        comm.Allgather(np.array([self.host], np.int64), host_of)
        self._host_of = host_of.tolist()
        # Each rank may have been given some of the host's cores.
        cores: set[int] = set().union(*self._host.allgather(core_numbers()))
        self._spins = self._local_size <= len(cores)
        self.link: Link = self._measure_link(comm) if self._parent is None else self._parent.link
        if self._chooses_chunks:
            self.chunk_bytes = self._choose_chunk_bytes(comm)
        if not self._share_memory(comm):
            messages = MpiTransport(*self._arguments, bucket_bytes=self._asked_bucket_bytes)
            return messages.open(ranks)
        self.detector: FailureDetector = FailureDetector(
            self._mpi,
            comm.Dup(),
            self.timeout_s,
            lambda: ranks.operation,
            ranks.survives_losses,
            ranks.numbers,
            None if self._parent is None else self._parent.detector.detectors,
        )
        self._spin_wait = SpinWait(self.detector, self.timeout_s, self._spins)
        # Apart, as it is no wait for a rank that is late.
        self._data_wait = SpinWait(self.detector, self.timeout_s, self._spins)
        if self._min_np is not None:
            self.recovery = Recovery(
                self._mpi, self, self.detector, self._spin_wait, self._min_np, self.timeout_s
            )
        self.connect(comm.Dup(), ranks.members)
        self.bucket_bytes = self._choose_bucket_bytes()
        if ranks.rank == 0 and self._parent is None and self._parties > 1:
            self._say_how_arrays_cross()
        self._watchdog = Watchdog(self._inside_mpi, ranks.number, ranks.size, self.timeout_s)
        self._watchdog.start()
        return self

    def _choose_chunk_bytes(self, comm: Any) -> int:
        return choose_chunk_bytes(comm.Get_size())

    def _choose_bucket_bytes(self) -> int:
        if self._asked_bucket_bytes is not None:
            return self._asked_bucket_bytes
        # On one host combining takes the cores from computing.
        one_host = self._local_size == self.ranks.size
        if one_host:
            return 0
        return choose_bucket_bytes(self.link, self._parties, self.chunk_bytes * self._turns)

    @property
    def _parties(self) -> int:
        """The number of parties that exchange arrays over links: here each rank is one."""
        return self.ranks.size

    def _say_how_arrays_cross(self) -> None:
        logger.debug(
            "between %d a message takes %.3f ms, and long ones go at %.0f Mbit/s: arrays up to %d "
            "bytes cross in one round, up to %d in two, larger ones in chunks of %d and segments "
            "of %d",
            self._parties,
            self.link.latency_s * 1e3,
            self.link.bytes_per_s * 8 / 1e6,
            choose_one_shot_bytes(self._parties, self.link),
            self._small_bytes,
            self.chunk_bytes,
            self.segment_bytes,
        )

    def _measure_link(self, comm: Any) -> Link:
        return measure_link(self._mpi, comm)

    def connect(self, comm: Any, members: Sequence[int]) -> None:
        """Set up all that depends on who the ranks are; collective over ``comm``.

        Args:
            comm: Used by this transport alone.
            members: The first numbers of its ranks.
        """
        self.comm = comm
        ranks = self.ranks
        ranks.rank, ranks.size, ranks.members = comm.Get_rank(), comm.Get_size(), tuple(members)
        self.segment_bytes = choose_segment_bytes(self.link.bytes_per_s, self._parties)
        self._direct = DirectAllreduce(self._mpi, comm, self.segment_bytes)
        self._exchange = DirectExchange(self._mpi, comm, self._await_all, self.segment_bytes)
        self._small = self._connect_small(comm)
        self._small_bytes = most_small_bytes(self._parties)
        self._scratch = Scratch()

    def _connect_small(self, comm: Any) -> SmallAllreduce:
        return SmallAllreduce(self._mpi, comm, self.link, self._spin_wait, self._data_wait)

    def messages(self) -> PointToPoint:
        # Not the communicator of the operations: their messages must not be taken for others.
        comm, members = self.comm.Dup(), self.ranks.members
        return PointToPoint(self._mpi, comm, members, self.detector, self.timeout_s, self._spins)

    def confirm(self, call: Call) -> None:
        """Return when every rank holds its result of the operation."""
        self._spin_wait.until(self.comm.Ibarrier().Test, call.short_text)

    def revoke(self) -> None:
        """End whatever any rank waits for on this transport's communicators."""
        self.comm.Revoke()

    def subset(self, ranks: Sequence[int]) -> MpiTransport | None:
        me = self.ranks.rank
        color = 0 if me in ranks else self._mpi.UNDEFINED
        comm, host = self.comm.Split(color, me), self._host.Split(color, me)
        if me not in ranks:
            return None
        most = comm.allreduce(host.Get_size(), self._mpi.MAX)
        transport = type(self) if most > 1 else MpiTransport
        return transport(
            self._mpi,
            comm,
            host,
            self.chunk_bytes,
            self.timeout_s,
            parent=self,
            numbers=[self.ranks.numbers[rank] for rank in ranks],
            bucket_bytes=self._asked_bucket_bytes,
        )

    def fail(self, reason: str) -> None:
        for detector in self.detector.detectors:
            if detector is not self.detector:
                detector.tell_failure(reason)
        if not self.detector.fail(reason) and self.recovery is not None:
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
        rejoin = self.recovery.rejoin if self.recovery is not None else lambda: None
        for detector in self.detector.detectors:
            if detector is not self.detector:
                detector.tell_end()
        if self._mpi.Is_finalized():
            return
        failing = code not in (0, Preempted.EXIT_CODE)
        if self.detector.leave(rejoin, failing_code=code if failing else None):
            self._mpi.Finalize()
        elif failing and self.recovery is not None and not self.detector.failed:
            # The others would take this rank for one that died, and go on.
            self._end_all(code)

    def close(self) -> None:
        self._watchdog.close()

    def free(self) -> None:
        # Lost ranks can't take part, and a failed one does not.
        if self.ranks.survives_losses or self.detector.failed or self._mpi.Is_finalized():
            return
        for comm in self._communicators():
            comm.Free()
        # Without another init() the end of the program needs that of all ranks.
        if self._parent is not None:
            self.free_detector()

    def free_detector(self) -> None:
        """Free the communicator by which ranks learn that others fail; see ``free``."""
        if not self.ranks.survives_losses and not self.detector.failed:
            self.detector.close()

    def _communicators(self) -> list[Any]:
        """Return the communicators that belong to this transport."""
        predefined = self._mpi.COMM_WORLD, self._mpi.COMM_SELF
        return [self.comm, *(comm for comm in (self._host, self._all) if comm not in predefined)]

    def _inside_mpi(self) -> tuple[float, str] | None:
        """Return since when this rank is inside MPI, and in what; None outside, or in a wait."""
        inside = self.ranks.inside
        waits = self._spin_wait, self._data_wait
        if inside is None or any(wait.waits for wait in waits):
            return None
        return max(inside[0], *(wait.waited_until_s for wait in waits)), inside[1]

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        waits = self._spin_wait, self._data_wait
        for wait in waits:
            wait.patient = True
        try:
            yield
        finally:
            for wait in waits:
                wait.patient = False

    @property
    def waited_s(self) -> float:
        return self._spin_wait.waited_s

    def _share_memory(self, comm: Any) -> bool:
        """Set up what the ranks of a host share, and keep when some die; collective.

        Returns:
            Whether it could be had; the same on all ranks.
        """
        return True

    def agree(self, call: Call) -> bool:
        return self._small.agree(call)

    def check_peers(self, waiting_in: str, waited_s: float) -> None:
        self.detector.check(waiting_in)
        if waited_s > self.timeout_s:
            self.detector.time_out(waiting_in, self.timeout_s)

    def allreduce(self, asked: Reduction) -> bool:
        if self._is_small(asked):
            return self._allreduce_small(asked)
        if not self.agree(asked.call):
            return False
        dtype = asked.inputs[0].dtype
        ahead = chunks_ahead(self.ranks.size, self.chunk_bytes, self.segment_bytes)
        under_way: deque[tuple[Chunk, Transfer]] = deque()
        for number, chunk in enumerate(asked.layout.chunks):
            packed = self._scratch.take(f"chunk {number % (ahead + 1)}", dtype, chunk.items)
            pack(chunk.pieces, asked.inputs, packed)
            transfer = self._direct.start(packed, packed, asked.op, self.ranks.size, asked.wire)
            under_way.append((chunk, transfer))
            if len(under_way) > ahead:
                self._complete(*under_way.popleft(), asked)
        while under_way:
            self._complete(*under_way.popleft(), asked)
        return True

    def _is_small(self, asked: Reduction) -> bool:
        chunks = asked.layout.chunks
        wide = accumulator_dtype(asked.inputs[0].dtype)
        return len(chunks) == 1 and 0 < chunks[0].items * wide.itemsize <= self._small_bytes

    def _allreduce_small(self, asked: Reduction) -> bool:
        [chunk] = asked.layout.chunks
        packed = self._scratch.take("chunk 0", asked.inputs[0].dtype, chunk.items)
        pack(chunk.pieces, asked.inputs, packed)
        if not self._small.allreduce(asked.call, packed, asked.op, self.ranks.size):
            return False
        self._deliver(chunk, packed, asked)
        return True

    def _complete(self, chunk: Chunk, transfer: Transfer, asked: Reduction) -> None:
        self.finish(self._direct, transfer, asked.call)
        self._deliver(chunk, transfer.out, asked)

    def _deliver(self, chunk: Chunk, total: np.ndarray, asked: Reduction) -> None:
        if asked.finite is not None:
            asked.finite.check(total)
        unpack(chunk.pieces, total, asked.outputs)

    def finish(self, direct: DirectAllreduce, transfer: Transfer, call: Call) -> None:
        """Return when the transfer is done."""

        def done() -> bool:
            direct.progress()
            return transfer.done

        self._data_wait.until(done, call.short_text)

    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        self._exchange.allgather(data, out, counts)

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        self._exchange.broadcast(buffer, root)

    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        self._exchange.alltoall(data, send_counts, out, receive_counts)

    def _await_all(self, requests: list[Any]) -> None:
        """Wait for messages of the operation that this rank is in."""
        inside = self.ranks.inside
        waiting_in = inside[1] if inside is not None else ""
        self._data_wait.until(lambda: self._mpi.Request.Testall(requests), waiting_in)
