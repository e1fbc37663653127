"""Point-to-point messages between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.collectives.failure_detector import FailureDetector
from hvdtrain.collectives.fusion import messages_of
from hvdtrain.collectives.waits import SpinWait
from hvdtrain.errors import PeerLostError

__all__ = ["PendingMessage", "PointToPoint"]


class PendingMessage(NamedTuple):
    """A message that is being sent to a rank, or received from a rank."""

    request: Any
    rank: int


class PointToPoint:
    """Messages of bytes, sent from the caller's memory without serialization.

    All rank arguments are initial ranks. If any rank exits while another rank waits for a message,
    the waiting rank raises an error. So all ranks must call an operation of the engine after their
    last message.

    In elastic jobs, a dead rank only affects ranks that exchange messages with it.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: Any,
        members: Sequence[int],
        detector: FailureDetector,
        timeout_s: float,
        spins: bool,
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._members = tuple(members)
        self._places = {member: place for place, member in enumerate(members)}
        self._detector = detector
        # MPI may still write to the buffers of unfinished messages.
        self._abandoned: list[PendingMessage] = []
        self._spin_wait = SpinWait(detector, timeout_s, spins, needs_all=True)
        self._endless = SpinWait(detector, math.inf, spins, needs_all=True)
        self._inside = ""

    @property
    def waiting_in(self) -> str:
        """What this rank waits for, or "" if it is not waiting. Other threads may read this."""
        return self._inside

    @property
    def lost(self) -> set[int]:
        """Ranks that are known to be dead."""
        return self._detector.lost

    def start_send(self, data: np.ndarray, to: int, tag: int) -> list[PendingMessage]:
        """Start to send a contiguous array.

        The array must not change until ``wait`` has returned.

        Raises:
            PeerLostError: If the receiver died.
        """
        return self._start(self._comm.Isend, data, to, tag)

    def start_receive(self, buffer: np.ndarray, source: int, tag: int) -> list[PendingMessage]:
        """Start to receive a message with the size of ``buffer``.

        The buffer must not be used until ``wait`` has returned.

        Raises:
            PeerLostError: If the sender died.
        """
        return self._start(self._comm.Irecv, buffer, source, tag)

    def wait(
        self,
        pending: Sequence[PendingMessage],
        waiting_in: str,
        *,
        endless: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until all messages from ``start_send`` and ``start_receive`` are transferred.

        Pass ``endless=True`` to wait without a time-out, but only if the other rank's wait has a
        time-out. The function ``unless`` is called often. Once ``unless()`` returns true, this
        method returns early.

        Raises:
            PeerLostError: If the sender or receiver of a message died.
            PeerFailedError: If another rank failed or exited.
            CollectiveTimeoutError: If the wait took too long.
        """
        unfinished = list(pending)
        spin_wait = self._endless if endless else self._spin_wait

        def done() -> bool:
            return unless() or self._remove_finished(unfinished, waiting_in)

        try:
            self._wait_until(done, spin_wait, waiting_in)
        finally:
            self._abandoned += unfinished

    def receive_any(
        self,
        buffer: np.ndarray,
        tag: int,
        waiting_in: str,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Receive a message with the size of ``buffer`` from any rank, and return the sender.

        The function ``unless`` is called often. This method returns None once ``unless()`` returns
        true, or if the sender died.

        Raises:
            PeerFailedError: If another rank failed or exited.
            CollectiveTimeoutError: If no message arrived in time.
        """
        status = self._mpi.Status()
        messages: list[Any] = []

        def done() -> bool:
            try:
                message = self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status)
            except self._mpi.Exception as error:
                self._record_loss(error)
                message = None
            if message is not None:
                messages.append(message)
            return bool(messages) or unless()

        self._wait_until(done, self._spin_wait, waiting_in)
        if not messages:
            return None
        try:
            messages[0].Recv([buffer.view(np.uint8), self._mpi.BYTE])
        except self._mpi.Exception as error:
            self._record_loss(error)
            return None
        return self._members[status.Get_source()]

    def _start(
        self, start: Callable[..., Any], data: np.ndarray, rank: int, tag: int
    ) -> list[PendingMessage]:
        place, byte = self._places[rank], self._mpi.BYTE
        try:
            requests = [start([part, byte], place, tag) for part in messages_of(data)]
        except self._mpi.Exception as error:
            self._record_loss(error)
            raise self.peer_lost_error(rank, "exchanged messages with it") from None
        return [PendingMessage(request, rank) for request in requests]

    def _remove_finished(self, pending: list[PendingMessage], waiting_in: str) -> bool:
        """Remove finished messages from the end of a list, and return whether the list is empty."""
        while pending:
            request, rank = pending[-1]
            try:
                done = request.Test()
            except self._mpi.Exception as error:
                self._record_loss(error)
                # MPI now reports the request as done.
                self.lost.add(rank)
                done = False
            if not done and rank in self.lost:
                raise self.peer_lost_error(rank, f"waited for it in {waiting_in}")
            if not done:
                return False
            pending.pop()
        return True

    def _record_loss(self, error: Exception) -> None:
        self._detector.record_loss(error, self._comm, self._members)

    def peer_lost_error(self, rank: int, doing: str) -> PeerLostError:
        """Return the error for a rank that died while this rank needed it.

        ``doing`` describes what this rank was doing, such as "exchanged messages with it".
        """
        own = self._detector.rank
        return PeerLostError(
            f"rank {rank} died while rank {own} {doing}. Rank {own} can't continue without it. "
            "Start the job again; with hvdtrain.Checkpoint it resumes from the newest checkpoint.",
            rank,
        )

    def _wait_until(self, ready: Callable[[], bool], spin_wait: SpinWait, waiting_in: str) -> None:
        self._inside = waiting_in
        try:
            spin_wait.until(ready, waiting_in)
        finally:
            self._inside = ""
