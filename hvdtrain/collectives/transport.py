"""The interface between an engine, which checks calls, and a transport, which moves bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.fusion import BufferPool, FusionLayout, aligned
from hvdtrain.collectives.kernels import FiniteCheck, ReduceOp
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.recovery import Recovery
from hvdtrain.collectives.wire_format import WireFormat
from hvdtrain.errors import CollectiveTimeoutError, ConfigurationError, TooFewRanksError

__all__ = ["RankState", "Reduction", "Transport"]

# Most operations take less time if the ranks are in step.
LONG_S = 0.01


class RankState:
    """The state that an engine shares with its transport.

    The transport updates the attributes about the ranks of the job. The engine updates the
    attributes about its current operation. Attributes that are not listed here are described in
    ``Engine``.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.members: tuple[int, ...] = (0,)
        self.numbers: tuple[int, ...] = self.members
        self.contributed: tuple[int, ...] = self.members
        self.survives_losses = False
        self.generation = 0
        self.too_few: TooFewRanksError | None = None
        self.operation = 0  # number of this rank's current or latest operation, from 1
        # Start time (``time.monotonic()``) and text of the operation in progress, or None. Other
        # threads may read this.
        self.inside: tuple[float, str] | None = None

    @property
    def member(self) -> int:
        """The initial rank of this process, which it keeps when other ranks are lost."""
        return self.members[self.rank]

    @property
    def number(self) -> int:
        """This process's rank in the job, for error messages."""
        return self.numbers[self.member]

    @property
    def waiting_in(self) -> str:
        """The operation in which this rank waits for other ranks, as text.

        The text is empty if this rank does not wait, or has only just begun to wait.
        Other threads may read this.
        """
        inside = self.inside
        return inside[1] if inside and time.monotonic() - inside[0] > LONG_S else ""

    def set_ranks(self, rank: int, size: int, numbers: Sequence[int] | None = None) -> None:
        """Set the initial ranks to 0, 1, ..., ``size - 1``.

        If the engine connects a subset of the job, ``numbers`` contains the job's rank for each of
        these ranks.
        """
        self.rank, self.size = rank, size
        self.members = self.contributed = tuple(range(size))
        self.numbers = self.members if numbers is None else tuple(numbers)


class Reduction(NamedTuple):
    """The arguments of an allreduce.

    Inputs and outputs are flat arrays of one dtype. ``wire`` is the format in which float32 data is
    sent between hosts. If it is None, the data is sent as float32.
    """

    call: Call
    layout: FusionLayout
    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    op: ReduceOp
    finite: FiniteCheck | None
    wire: WireFormat | None = None


class Transport:
    """Moves bytes between ranks. This base class is the transport of a single process.

    ``agree`` and ``allreduce`` start an operation: they wait until every rank has called them. The
    engine calls the methods that move other data only after ``agree`` has returned True.

    Args:
        chunk_bytes: Number of bytes to reduce at a time.
        timeout_s: Seconds to wait for other ranks.

    Attributes:
        kind: Name of the transport.
        bucket_bytes: As in ``Engine``.
        shares: Number of ranks among which the work on a chunk is divided.
        host: A number that is the same on all ranks that share memory with this rank. None if ranks
            can't share memory.
        recovery: Repeats operations after ranks are lost. None if a lost rank ends the job.
    """

    kind = "single"
    shares = 1
    bucket_bytes = 0
    host: int | None = None
    recovery: Recovery | None = None

    def __init__(self, chunk_bytes: int = 1 << 20, timeout_s: float = 600.0) -> None:
        # Whole cache lines, and at least one item of every dtype.
        self.chunk_bytes = aligned(chunk_bytes)
        self.timeout_s = timeout_s
        self._pool = BufferPool()

    def open(self, ranks: RankState) -> Transport:
        """Connect the ranks. Update the state ``ranks`` now, and after every loss of ranks.

        All ranks must call this.

        Returns:
            The transport to use: this one, or a fallback if this one does not work here.
        """
        self.ranks = ranks
        return self

    @property
    def waited_s(self) -> float:
        """Total seconds spent waiting for other ranks, not counting short waits."""
        return 0.0

    def agree(self, call: Call) -> bool:
        """Wait until every rank has made a call, and return whether all calls are the same."""
        return True

    def allreduce(self, reduction: Reduction) -> bool:
        """Combine all inputs into the outputs. Return False if the ranks' calls differ."""
        for array, out in zip(reduction.inputs, reduction.outputs):
            np.copyto(out, array)
            if reduction.finite is not None:
                reduction.finite.check(out)
        return True

    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate ``counts[r]`` bytes of each rank ``r`` in ``out``."""
        np.copyto(out, data)

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        """Fill the buffers of all ranks with the bytes of ``root``."""

    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        """Send ``send_counts[r]`` bytes to each rank ``r``, in order from ``data``."""
        np.copyto(out, data)

    def messages(self) -> PointToPoint:
        """Open a channel for point-to-point messages. All ranks must call this."""
        raise ConfigurationError(
            "Messages need at least two ranks, got one process; start more with mpirun, srun or "
            "hvdtrain run."
        )

    def subset(self, ranks: Sequence[int]) -> Transport | None:
        """Return a transport for some ranks, or None on others. All ranks must call this."""
        return Transport()

    def take_buffer(self, nbytes: int) -> np.ndarray:
        """Return an unused flat uint8 array for results."""
        return self._pool.take(nbytes)

    def start_over(self) -> None:
        """Discard an operation that has started but has not finished. All ranks must call this."""

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Disable the time-out of waits in the block."""
        yield

    def check_peers(self, waiting_in: str, waited_s: float | None) -> None:
        """Raise an error if another rank has failed, or if this rank has waited too long.

        ``waited_s`` is None if this rank is inside an operation, but does not wait for the other
        ranks.
        """
        if waited_s is not None and waited_s > self.timeout_s:
            raise CollectiveTimeoutError(
                f"rank {self.ranks.number} waited {self.timeout_s:g} s in {waiting_in}. If the "
                "work may take that long, raise HVDTRAIN_TIMEOUT_S."
            )

    def fail(self, reason: str) -> None:
        """Notify every other rank that this rank has failed."""

    def leave(self, code: int = 0) -> None:
        """Wait for the other ranks at the end of a program that exits with ``code``."""

    def close(self) -> None:
        """Stop background threads."""

    def free(self) -> None:
        """Free memory and communicators after the last operation. All ranks must call this."""
