"""The transport that sends MPI messages. The ranks may run on any hosts."""

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
from hvdtrain.collectives.kernels import accumulator_dtype
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.recovery import Recovery
from hvdtrain.collectives.small_allreduce import SmallAllreduce
from hvdtrain.collectives.transport import RankState, Reduction, Transport
from hvdtrain.collectives.tuning import (
    CHUNK_BYTES,
    Link,
    choose_bucket_bytes,
    choose_chunk_bytes,
    choose_one_shot_bytes,
    choose_segment_bytes,
    measure_link,
    most_small_bytes,
)
from hvdtrain.collectives.waits import SpinWait, Watchdog
from hvdtrain.errors import Preempted

__all__ = ["MpiTransport"]

logger = logging.getLogger(__name__)


class MpiTransport(Transport):
    """Moves bytes over an MPI communicator.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: The communicator of all ranks, which the transport duplicates.
        host: A communicator of the ranks that share memory with this rank, in the same order as in
            ``comm``.
        chunk_bytes: Number of bytes to reduce at a time, or None to choose it.
        timeout_s: Seconds to wait for other ranks.
        min_np: Minimum number of ranks in an elastic job. The job continues when ranks die, but
            ``too_few`` is set if fewer than ``min_np`` remain. None if the job is not elastic, so
            that a dead rank ends the job.
        parent: The transport of all ranks, if this transport connects a subset of them.
        numbers: The job's rank for each rank of ``comm``, if this transport connects a subset.
        bucket_bytes: As in ``Engine``, or None to choose it.
    """

    kind = "mpi"
    # Ranks take turns: with n turns, each rank exchanges messages for every n-th chunk only.
    _turns = 1

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
        self._fixed_bucket_bytes = bucket_bytes
        self._mpi = mpi
        self._all, self._host = comm, host
        self._local_size = host.Get_size()
        self._min_np = min_np
        self._parent, self._numbers = parent, numbers

    def open(self, ranks: RankState) -> Transport:
        """Measure the links, and set up communicators and failure detection, on all ranks."""
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
        # Ranks may be bound to different cores of the host.
        cores: set[int] = set().union(*self._host.allgather(core_numbers()))
        self._spins = self._local_size <= len(cores)
        self.link: Link = self._measure_link(comm) if self._parent is None else self._parent.link
        if self._chooses_chunks:
            self.chunk_bytes = self._choose_chunk_bytes(comm)
        if not self._share_memory(comm):
            messages = MpiTransport(*self._arguments, bucket_bytes=self._fixed_bucket_bytes)
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
        # The time of these waits does not count as waiting for late ranks.
        self._data_wait = SpinWait(self.detector, self.timeout_s, self._spins)
        if self._min_np is not None:
            self.recovery = Recovery(
                self._mpi, self, self.detector, self._spin_wait, self._min_np, self.timeout_s
            )
        self.connect(comm.Dup(), ranks.members)
        self.bucket_bytes = self._choose_bucket_bytes()
        if ranks.rank == 0 and self._parent is None and self._parties > 1:
            self._log_message_sizes()
        self._watchdog = Watchdog(self._inside_mpi, ranks.number, ranks.size, self.timeout_s)
        self._watchdog.start()
        return self

    def _choose_chunk_bytes(self, comm: Any) -> int:
        return choose_chunk_bytes(comm.Get_size())

    def _choose_bucket_bytes(self) -> int:
        if self._fixed_bucket_bytes is not None:
            return self._fixed_bucket_bytes
        if self._local_size == self.ranks.size:
            # On one host, reductions would compete with the backward pass for the cores.
            return 0
        return choose_bucket_bytes(self.link, self._parties, self.chunk_bytes * self._turns)

    @property
    def _parties(self) -> int:
        """Number of parties that exchange data over the network. Here, each rank is a party."""
        return self.ranks.size

    def _log_message_sizes(self) -> None:
        logger.debug(
            "%d endpoints, latency %.3f ms, %.0f Mbit/s: arrays up to %d bytes take one round, up "
            "to %d bytes two rounds, larger ones chunks of %d bytes in segments of %d bytes",
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
        """Set up everything that depends on the ranks of ``comm``, which must all call this."""
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
        """Open a new communicator for point-to-point messages. All ranks must call this."""
        comm, members = self.comm.Dup(), self.ranks.members
        return PointToPoint(self._mpi, comm, members, self.detector, self.timeout_s, self._spins)

    def confirm(self, call: Call) -> None:
        """Wait until every rank has its result of the operation."""
        self._spin_wait.until(self.comm.Ibarrier().Test, call.short_text)

    def revoke(self) -> None:
        """Interrupt all ranks that wait on the communicators of this transport."""
        self.comm.Revoke()

    def subset(self, ranks: Sequence[int]) -> MpiTransport | None:
        """Return a transport for some ranks, or None on other ranks.

        The transport uses no shared memory if each of these ranks is on a different host.
        """
        rank = self.ranks.rank
        color = 0 if rank in ranks else self._mpi.UNDEFINED
        comm, host = self.comm.Split(color, rank), self._host.Split(color, rank)
        if rank not in ranks:
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
            bucket_bytes=self._fixed_bucket_bytes,
        )

    def fail(self, reason: str) -> None:
        """Notify all ranks that this one has failed. If that fails in an elastic job, end it."""
        for detector in self.detector.detectors:
            if detector is not self.detector:
                detector.announce_failure(reason)
        if not self.detector.fail(reason) and self.recovery is not None:
            # Ranks that did not get the message would continue or hang, and mpirun would let them.
            self._abort(1)

    def _abort(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)
        raise AssertionError("MPI ends the process")

    def leave(self, code: int = 0) -> None:
        """Wait for the other ranks at the end of the program, then finalize MPI.

        MPI is not finalized after a rank has failed or died, because ``MPI_Finalize`` would wait
        for that rank. MPI is not finalized either if this program exits with an error code while
        other ranks are running. In this case the running ranks get a moment to exit. Then this
        process exits, and the launcher sees the code.
        """
        rejoin = self.recovery.rejoin if self.recovery is not None else lambda: None
        for detector in self.detector.detectors:
            if detector is not self.detector:
                detector.announce_end()
        if self._mpi.Is_finalized():
            return
        failing = code not in (0, Preempted.EXIT_CODE)
        if self.detector.leave(rejoin, failing_code=code if failing else None):
            self._mpi.Finalize()
        elif failing and self.recovery is not None and not self.detector.failed:
            # Otherwise the other ranks would treat this rank as lost, and continue.
            self._abort(code)

    def close(self) -> None:
        """Stop the watchdog."""
        self._watchdog.close()

    def free(self) -> None:
        """Free the communicators on all ranks, unless the job is elastic or a rank has failed."""
        if self.ranks.survives_losses or self.detector.failed or self._mpi.Is_finalized():
            return
        for comm in self._communicators():
            comm.Free()
        # The detector of all ranks is needed at the end of the program.
        if self._parent is not None:
            self.free_detector()

    def free_detector(self) -> None:
        """Free the communicator of the failure detector. All ranks must call this."""
        if not self.ranks.survives_losses and not self.detector.failed:
            self.detector.close()

    def _communicators(self) -> list[Any]:
        """Return the communicators that belong to this transport."""
        predefined = self._mpi.COMM_WORLD, self._mpi.COMM_SELF
        return [self.comm, *(comm for comm in (self._host, self._all) if comm not in predefined)]

    def _inside_mpi(self) -> tuple[float, str] | None:
        """Return when and in which operation this rank called MPI.

        Return None if this rank is not inside MPI, or if it is inside one of hvdtrain's own waits.
        """
        inside = self.ranks.inside
        waits = self._spin_wait, self._data_wait
        if inside is None or any(wait.is_waiting for wait in waits):
            return None
        return max(inside[0], *(wait.waited_until_s for wait in waits)), inside[1]

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Disable the time-out of waits in the block."""
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
        """Total seconds spent waiting for other ranks, not counting short waits."""
        return self._spin_wait.waited_s

    def _share_memory(self, comm: Any) -> bool:
        """Allocate shared memory on all ranks, and return whether that worked on all of them."""
        return True

    def agree(self, call: Call) -> bool:
        """Wait until every rank has made a call, and return whether all calls are the same."""
        return self._small.agree(call)

    def check_peers(self, waiting_in: str, waited_s: float | None) -> None:
        """Raise an error if another rank has failed, or if this rank has waited too long."""
        self.detector.check(waiting_in, waits=waited_s is not None)
        if waited_s is not None and waited_s > self.timeout_s:
            self.detector.time_out(waiting_in, self.timeout_s)

    def allreduce(self, reduction: Reduction) -> bool:
        """Combine the inputs of all ranks chunk by chunk, with several chunks in progress."""
        if self._is_small(reduction):
            return self._allreduce_small(reduction)
        if not self.agree(reduction.call):
            return False
        dtype = reduction.inputs[0].dtype
        ahead = chunks_ahead(self.ranks.size, self.chunk_bytes, self.segment_bytes)
        pending: deque[tuple[Chunk, Transfer]] = deque()
        for number, chunk in enumerate(reduction.layout.chunks):
            packed = self._scratch.take(f"chunk {number % (ahead + 1)}", dtype, chunk.items)
            pack(chunk.pieces, reduction.inputs, packed)
            size = self.ranks.size
            transfer = self._direct.start(packed, packed, reduction.op, size, reduction.wire)
            pending.append((chunk, transfer))
            if len(pending) > ahead:
                self._complete(*pending.popleft(), reduction)
        while pending:
            self._complete(*pending.popleft(), reduction)
        return True

    def _is_small(self, reduction: Reduction) -> bool:
        chunks = reduction.layout.chunks
        wide = accumulator_dtype(reduction.inputs[0].dtype)
        return len(chunks) == 1 and 0 < chunks[0].items * wide.itemsize <= self._small_bytes

    def _allreduce_small(self, reduction: Reduction) -> bool:
        [chunk] = reduction.layout.chunks
        packed = self._scratch.take("chunk 0", reduction.inputs[0].dtype, chunk.items)
        pack(chunk.pieces, reduction.inputs, packed)
        if not self._small.allreduce(reduction.call, packed, reduction.op, self.ranks.size):
            return False
        self._deliver(chunk, packed, reduction)
        return True

    def _complete(self, chunk: Chunk, transfer: Transfer, reduction: Reduction) -> None:
        self.finish(self._direct, transfer, reduction.call)
        self._deliver(chunk, transfer.out, reduction)

    def _deliver(self, chunk: Chunk, total: np.ndarray, reduction: Reduction) -> None:
        if reduction.finite is not None:
            reduction.finite.check(total)
        unpack(chunk.pieces, total, reduction.outputs)

    def finish(self, direct: DirectAllreduce, transfer: Transfer, call: Call) -> None:
        """Wait until the transfer is complete."""

        def done() -> bool:
            direct.progress()
            return transfer.left == 0

        self._data_wait.until(done, call.short_text)

    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate ``counts[r]`` bytes of each rank ``r`` in ``out``."""
        self._exchange.allgather(data, out, counts)

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        """Fill the buffers of all ranks with the bytes of ``root``."""
        self._exchange.broadcast(buffer, root)

    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        """Send ``send_counts[r]`` bytes to each rank ``r``, in order from ``data``."""
        self._exchange.alltoall(data, send_counts, out, receive_counts)

    def _await_all(self, requests: list[Any]) -> None:
        """Wait for messages of the current operation."""
        inside = self.ranks.inside
        waiting_in = inside[1] if inside is not None else ""
        self._data_wait.until(lambda: self._mpi.Request.Testall(requests), waiting_in)
