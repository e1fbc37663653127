"""Messages from one rank to another, beside the collectives; every wait has an end."""

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
    """A message on its way from or to a rank."""

    request: Any
    rank: int


class PointToPoint:
    """Point-to-point messages of bytes.

    Ranks are the first numbers of the engine's. Nothing is serialised, and what is sent travels
    from the caller's own memory. A rank that leaves while another waits here is an error there:
    an operation has to come after the last message.

    Where ranks may be lost, a dead one concerns only who has a message for it, or waits for one.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: A communicator of all ranks, used by nothing else.
        members: Their first numbers.
        detector: Looked at while waiting is long.
        timeout_s: After that many seconds waiting is an error.
        spins: See ``SpinWait``.
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
        # MPI may still write to the buffers of what was begun with a rank that died.
        self._abandoned: list[PendingMessage] = []
        self._spin_wait = SpinWait(detector, timeout_s, spins, needs_all=True)
        self._endless = SpinWait(detector, math.inf, spins, needs_all=True)
        self._inside = ""

    @property
    def waiting_in(self) -> str:
        """The text of what this rank waits for, or ""; another thread may ask."""
        return self._inside

    @property
    def lost(self) -> set[int]:
        """The ranks that died, as far as is known here."""
        return self._detector.lost

    def start_send(self, data: np.ndarray, to: int, tag: int) -> list[PendingMessage]:
        """Begin to send; ``data`` must stay as it is until ``wait`` has returned.

        Args:
            data: Contiguous, of any type.
            to: The rank.
            tag: Must be the same where it is received.

        Returns:
            For ``wait``.

        Raises:
            PeerLostError: The rank died.
        """
        return self._start(self._comm.Isend, data, to, tag)

    def start_receive(self, buffer: np.ndarray, source: int, tag: int) -> list[PendingMessage]:
        """Begin to receive as many bytes as ``buffer`` has; else as ``start_send``."""
        return self._start(self._comm.Irecv, buffer, source, tag)

    def wait(
        self,
        pending: Sequence[PendingMessage],
        waiting_in: str,
        *,
        endless: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when all of them are done.

        Args:
            pending: What ``start_send`` and ``start_receive`` returned.
            waiting_in: For errors, and for whoever asks.
            endless: Wait as long as no rank fails, because the other side gives up in time.
            unless: Whether to give them up instead of waiting on; asked often.

        Raises:
            PeerLostError: A rank died that one of them comes from, or goes to.
            PeerFailedError: Another rank failed or left meanwhile.
            CollectiveTimeoutError: The time is over.
        """
        left = list(pending)
        spin_wait = self._endless if endless else self._spin_wait

        def over() -> bool:
            return unless() or self._are_over(left, waiting_in)

        try:
            self._wait_until(over, spin_wait, waiting_in)
        finally:
            self._abandoned += left

    def receive_any(
        self,
        buffer: np.ndarray,
        tag: int,
        waiting_in: str,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Wait for a message from whichever rank; returns which.

        Args:
            buffer: Takes it; as many bytes as it has.
            tag: The tag of the message.
            waiting_in: For errors, and for whoever asks.
            unless: Whether to return None instead of waiting on; asked often. So it does where
                the sender dies.

        Raises:
            PeerFailedError: Another rank failed or left meanwhile.
            CollectiveTimeoutError: None came in time.
        """
        status = self._mpi.Status()
        found: list[Any] = []

        def came() -> bool:
            try:
                message = self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status)
            except self._mpi.Exception as error:
                self._note_lost(error)
                message = None
            if message is not None:
                found.append(message)
            return bool(found) or unless()

        self._wait_until(came, self._spin_wait, waiting_in)
        if not found:
            return None
        try:
            found[0].Recv([buffer.view(np.uint8), self._mpi.BYTE])
        except self._mpi.Exception as error:
            self._note_lost(error)
            return None
        return self._members[status.Get_source()]

    def _start(
        self, start: Callable[..., Any], data: np.ndarray, rank: int, tag: int
    ) -> list[PendingMessage]:
        place, byte = self._places[rank], self._mpi.BYTE
        try:
            requests = [start([part, byte], place, tag) for part in messages_of(data)]
        except self._mpi.Exception as error:
            self._note_lost(error)
            raise self.loss_of(rank, "exchanged messages with it") from None
        return [PendingMessage(request, rank) for request in requests]

    def _are_over(self, pending: list[PendingMessage], waiting_in: str) -> bool:
        """Take away those that are done, from the last on; returns whether none is left."""
        while pending:
            request, rank = pending[-1]
            try:
                done = request.Test()
            except self._mpi.Exception as error:
                self._note_lost(error)
                # From here on MPI takes the request for one that is done.
                self.lost.add(rank)
                done = False
            if not done and rank in self.lost:
                raise self.loss_of(rank, f"waited for it in {waiting_in}")
            if not done:
                return False
            pending.pop()
        return True

    def _note_lost(self, error: Exception) -> None:
        self._detector.note_lost(error, self._comm, self._members)

    def loss_of(self, rank: int, doing: str) -> PeerLostError:
        """The error of a rank that can't do without another.

        Args:
            rank: The one that died.
            doing: What this rank did meanwhile.
        """
        me = self._detector.rank
        return PeerLostError(
            f"rank {rank} died while rank {me} {doing}. Rank {me} can't go on without it. Start "
            "the job again; with hvdtrain.Checkpoint it goes on from the newest checkpoint.",
            rank,
        )

    def _wait_until(self, ready: Callable[[], bool], spin_wait: SpinWait, waiting_in: str) -> None:
        self._inside = waiting_in
        try:
            spin_wait.until(ready, waiting_in)
        finally:
            self._inside = ""
