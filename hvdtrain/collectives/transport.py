"""The contract between an engine, which checks and agrees, and what moves the bytes for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.fusion import BufferPool, FusionLayout, aligned
from hvdtrain.collectives.kernels import FiniteCheck, ReduceOp
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.rank_state import RankState
from hvdtrain.collectives.recovery import Recovery
from hvdtrain.collectives.wire_format import WireFormat
from hvdtrain.errors import CollectiveTimeoutError

__all__ = ["Reduction", "Transport"]


class Reduction(NamedTuple):
    """One allreduce as it was asked for; inputs and outputs are flat arrays of one type.

    ``wire`` is how they cross between hosts, if not as they are; then they are float32.
    """

    call: Call
    layout: FusionLayout
    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    op: ReduceOp
    finite: FiniteCheck | None
    wire: WireFormat | None = None


class Transport(ABC):
    """Moves bytes between ranks that make the same calls; the engine sees to it that they do.

    ``agree`` and ``allreduce`` begin an operation: they wait until every rank is there.

    Args:
        chunk_bytes: How much is combined at a time.
        timeout_s: How long to wait for other ranks.

    Attributes:
        kind: The name of the engine that uses it.
        bucket_bytes: How much of gradients is best combined at a time while others are still
            computed; 0 where all together.
        shares: Among how many ranks a chunk is divided for combining it.
        host: A number of the host whose memory this rank shares with others; None where ranks
            can't share memory.
        recovery: Makes attempts of an operation until it has succeeded on all ranks that are left;
            None where a lost rank ends the job.
    """

    kind = ""
    shares = 1
    bucket_bytes = 0
    host: int | None = None
    recovery: Recovery | None = None

    def __init__(self, chunk_bytes: int = 1 << 20, timeout_s: float = 600.0) -> None:
        # Whole cache lines, and at least one item of every type.
        self.chunk_bytes = aligned(chunk_bytes)
        self.timeout_s = timeout_s
        self._pool = BufferPool()

    def open(self, ranks: RankState) -> Transport:
        """Begin to serve one engine; collective.

        Args:
            ranks: Is told which ranks there are, now and whenever some are lost.

        Returns:
            The transport to use: this one, or another where this one can't work.
        """
        self.ranks = ranks
        return self

    @property
    def waited_s(self) -> float:
        """The time this rank has waited for others in all, in seconds; short waits don't count."""
        return 0.0

    @abstractmethod
    def agree(self, call: Call) -> bool:
        """Return when every rank has made a call: whether all of them made the same."""

    @abstractmethod
    def allreduce(self, asked: Reduction) -> bool:
        """Combine the inputs of all ranks into the outputs; False as for ``agree``."""

    @abstractmethod
    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """Put the bytes of all ranks, ``counts[r]`` of rank r, one after the other into ``out``."""

    @abstractmethod
    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        """Fill the buffers of all ranks with the bytes of ``root``."""

    @abstractmethod
    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        """Send the next ``send_counts[r]`` bytes of ``data`` to each rank r; the same for out."""

    @abstractmethod
    def messages(self) -> PointToPoint:
        """Open a way to send messages to single ranks; collective."""

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> Transport | None:
        """A transport for these ranks, which are in order; None on the others; collective."""

    def take_buffer(self, nbytes: int) -> np.ndarray:
        """A flat uint8 array that nobody else holds, for results."""
        return self._pool.take(nbytes)

    def start_over(self) -> None:  # noqa: B027
        """Forget an operation that was begun, on all ranks together."""

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Wait for other ranks without a time-out within the block."""
        yield

    def look_for_others(self, waiting_in: str, waited_s: float) -> None:
        """Raise if another rank has failed, or this one has waited too long."""
        if waited_s > self.timeout_s:
            raise CollectiveTimeoutError(
                f"rank {self.ranks.number} waited {self.timeout_s:g} s in {waiting_in}. If the "
                "work may take that long, raise HVDTRAIN_TIMEOUT_S."
            )

    def fail(self, reason: str) -> None:  # noqa: B027
        """Tell every other rank that this one can't go on; there may be nobody to tell."""

    def leave(self, code: int = 0) -> None:  # noqa: B027
        """Wait for the other ranks at the end of a program that ends with this exit code."""

    def close(self) -> None:  # noqa: B027
        """Stop what runs beside the operations."""

    def free(self) -> None:  # noqa: B027
        """Free memory and communicators, which all ranks do, after the last operation."""
