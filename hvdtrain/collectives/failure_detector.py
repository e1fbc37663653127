"""Failure detection: a rank that waits for others learns that one of them has failed or died.

Messages about failures use a separate communicator. A waiting rank checks for them every few
milliseconds. No messages are sent unless a rank fails or exits. In elastic jobs, this module also
notices dead ranks. The communicator remains in use after a death, so ranks in this module are not
renumbered: they are initial ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.errors import CollectiveTimeoutError, PeerFailedError

__all__ = ["FailureDetector", "RanksLost", "is_loss"]

logger = logging.getLogger(__package__)

FAILED, SEEN, LEFT, ASK, ANSWER, STOPPED = 1, 2, 3, 4, 5, 6

FAREWELL_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 3.0
# How long a program that exits with an error code waits for the other ranks to exit.
EXIT_TIMEOUT_S = 1.0
POLL_S = 0.002
# Number of probes per check in elastic jobs, because Open MPI notices dead ranks, and tells other
# ranks about them, only in some of its calls.
PROBES = 16


class RanksLost(Exception):
    """Raised to stop the current operation because a rank died. ``Recovery`` catches this."""


def is_loss(mpi: ModuleType, error: Any) -> bool:
    """Return whether an ``MPI.Exception`` means that a rank died.

    If another rank noticed the death first, that rank has revoked the communicator. The resulting
    error on this rank also means that a rank died.
    """
    return error.Get_error_class() in (
        mpi.ERR_PROC_FAILED,
        mpi.ERR_PROC_FAILED_PENDING,
        mpi.ERR_REVOKED,
    )


class FailureDetector:
    """Notifies other ranks of failures, and asks them which operation they are waiting in.

    Args:
        operations: Function that returns the number of operations that this rank has started.
        survives: Whether the other ranks continue when a rank dies.
        numbers: The job's rank for each rank of the communicator, for error messages. Only needed
            if the communicator connects a subset of the job's ranks.
        detectors: The detectors of all engines of this process. While a rank waits in one engine,
            it answers the messages of all engines.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: Any,
        timeout_s: float,
        operations: Callable[[], int],
        survives: bool = False,
        numbers: Sequence[int] | None = None,
        detectors: list[FailureDetector] | None = None,
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._timeout_s = timeout_s
        self._operations = operations
        self._survives = survives
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._numbers = tuple(numbers or range(self.size))
        self.detectors: list[FailureDetector] = [] if detectors is None else detectors
        self.detectors.append(self)
        self._others = [r for r in range(self.size) if r != self.rank]
        # All dead ranks, including those without which the job has already continued.
        self.lost: set[int] = set()
        self._generation = 0
        # The latest generation in which each rank has stopped its operation because of a loss.
        self._stopped: dict[int, int] = {}
        self._failure: tuple[int, str] | None = None
        self._this_rank_failed = False
        self._seen: set[int] = set()
        # For each rank that has exited, the number of operations that it had started.
        self._left: dict[int, int] = {}
        self._positions: dict[int, str] = {}
        self._silent: set[int] = set()
        self._pending: list[tuple[Any, np.ndarray]] = []

    def close(self) -> None:
        """Free the communicator. All ranks must call this."""
        self.detectors.remove(self)
        self._comm.Free()

    @property
    def failed(self) -> bool:
        """Whether any rank has failed."""
        return self._this_rank_failed or self._failure is not None

    def check(self, waiting_in: str, needs_all: bool = False, waits: bool = True) -> None:
        """Process messages, and raise an error if another rank has failed or exited.

        Set ``needs_all`` if this rank waits for point-to-point messages instead of an operation.
        Then an exit of any rank raises an error. A lost rank raises no error, so the caller must
        check ``lost``. If ``waits`` is false, this rank computes, and does not answer ranks that
        ask what it waits for.

        Raises:
            PeerFailedError: If a rank has failed, or if it has exited and this rank is waiting for
                it.
            RanksLost: If a rank died, and this rank has not yet stopped its operation.
        """
        for detector in self.detectors:
            detector._receive(waiting_in if waits else "")
        own = self._names(self.rank)
        if self._failure is not None:
            rank, reason = self._failure
            raise PeerFailedError(
                f"rank {self._names(rank)} failed: {reason}. Rank {own} was waiting for it in "
                f"{waiting_in} and stops too."
            )
        if self.interrupted and not needs_all and not self._has_stopped(self.rank):
            raise RanksLost
        started = self._operations()
        exited = sorted(
            rank for rank, operations in self._left.items() if needs_all or operations < started
        )
        if exited:
            raise PeerFailedError(
                f"rank {self._names(*exited)} ended its program while rank {own} "
                f"waits for it in {waiting_in}. Every rank must make the same calls; look for an "
                "early exit, or for a step that only some ranks take."
            )

    def time_out(self, waiting_in: str, timeout_s: float) -> None:
        """Raise an error with the operation in which each other rank waits, if it answers."""
        missing = self._ask_positions(waiting_in)
        self._silent = set(missing)
        positions = [
            f"rank {self._names(rank)} waits in {text}"
            for rank, text in sorted(self._positions.items())
        ]
        if missing:
            positions.append(
                f"rank {self._names(*missing)} is not waiting in any collective: it hangs, or "
                "does something that the other ranks don't do"
            )
        raise CollectiveTimeoutError(
            f"rank {self._names(self.rank)} waited {timeout_s:g} s in {waiting_in}: "
            f"{'; '.join(positions)}. If the work may take that long, raise HVDTRAIN_TIMEOUT_S."
        )

    def warn_of_wait(self, waiting_in: str, waited_s: float) -> None:
        """Log which ranks this rank has been waiting for."""
        missing = self._names(*self._ask_positions(waiting_in)) or "another rank"
        logger.warning(
            f"rank {self._names(self.rank)} has waited {waited_s:.0f} s in {waiting_in} for "
            f"rank {missing}"
        )

    def record_loss(
        self, error: Exception, comm: Any = None, members: Sequence[int] | None = None
    ) -> None:
        """Record the dead ranks that an MPI error reports, or raise the error again.

        The dead ranks are acknowledged, because otherwise every further MPI probe would raise an
        error. ``members`` are the initial ranks of ``comm``. By default, ``comm`` is the detector's
        own communicator.
        """
        if not self._survives or not is_loss(self._mpi, error):
            raise error
        comm = comm or self._comm
        comm.Ack_failed()
        failed = comm.Get_failed().Translate_ranks(None, comm.Get_group())
        self.lost.update(failed if members is None else (members[rank] for rank in failed))

    @property
    def interrupted(self) -> bool:
        """Whether the operation can't complete, because a rank died or stopped after a death."""
        return any(rank in self.lost or self._has_stopped(rank) for rank in self._others)

    @property
    def all_stopped(self) -> bool:
        """Whether each living rank has stopped, so that none is inside an operation."""
        return all(rank in self.lost or self._has_stopped(rank) for rank in self._others)

    def stop(self) -> None:
        """Notify the other ranks that this rank has stopped because of a loss."""
        self._stopped[self.rank] = self._generation
        self._send_all(STOPPED, str(self._generation))

    def resume(self, members: Sequence[int], generation: int) -> None:
        """Continue with the remaining ranks after a loss."""
        self._generation = generation
        self._others = [rank for rank in members if rank != self.rank]
        self._left = {rank: self._left[rank] for rank in self._others if rank in self._left}

    def fail(self, reason: str) -> bool:
        """Notify all ranks that this rank failed, and return whether all of them know.

        This waits a few seconds for the other ranks. In elastic jobs it waits up to the time-out of
        operations, because otherwise this rank might exit before the other ranks know of the
        failure. They would then treat this rank as lost and continue.
        """
        if self._this_rank_failed or self.announce_failure(reason):
            return True
        listening = set(self._others) - self._silent

        def all_know() -> bool:
            return self._seen | self._left.keys() | self.lost >= listening

        timeout_s = self._timeout_s if self._survives else FAREWELL_TIMEOUT_S
        return self._wait_for(all_know, timeout_s) and not self._silent

    def announce_failure(self, reason: str) -> bool:
        """Notify all ranks of this rank's failure. Return whether another had failed before."""
        self._this_rank_failed = True
        self._receive("")
        if self._failure is not None:
            # This failure is a consequence of the first one.
            self._acknowledge()
            return True
        self._send_all(FAILED, reason)
        return False

    def announce_end(self) -> None:
        """Notify all ranks that this rank has ended its program."""
        self._send_all(LEFT, str(self._operations()))

    def leave(
        self, rejoin: Callable[[], None] = lambda: None, failing_code: int | None = None
    ) -> bool:
        """Wait, without a time-out, until all ranks have ended their programs.

        If this rank exited earlier, mpirun would end the other ranks, because it treats a rank that
        has not finalized MPI as failed. If a rank dies in an elastic job, ``rejoin`` is called once
        all other ranks have stopped. It removes the dead rank from the job. If this program exits
        with the error code ``failing_code``, the other ranks get only a short time to exit, because
        the end of this rank will end the job.

        Returns:
            Whether all ranks exited normally, so that MPI may be finalized.
        """
        if self.failed:
            if not self._this_rank_failed:
                self._acknowledge()
            return False
        self.announce_end()

        def settled() -> bool:
            return self._all_left() or self._failure is not None or self.interrupted

        if failing_code is not None:
            if not self._wait_for(settled, EXIT_TIMEOUT_S):
                logger.error(
                    f"rank {self.rank} of {self.size} ends with exit code {failing_code} before "
                    f"rank {self._running()} has ended"
                )
            return self._all_left() and not self.lost and not self.failed
        while not self._all_left() and self._failure is None:
            if not self.interrupted:
                self._wait_at_exit(settled)
                continue
            self.stop()
            self._wait_at_exit(
                lambda: self._all_left() or self._failure is not None or self.all_stopped
            )
            if self.all_stopped and not self._all_left():
                rejoin()
        if self._failure is not None:
            self._acknowledge()
        return not self.lost and not self.failed

    def _names(self, *ranks: int) -> str:
        return ", ".join(str(self._numbers[rank]) for rank in ranks)

    def _ask_positions(self, waiting_in: str) -> list[int]:
        """Ask the other ranks in which operations they wait. Return the ranks that don't answer."""
        self._positions.clear()
        self._send_all(ASK, "")
        deadline = time.monotonic() + ASK_TIMEOUT_S
        while len(self._positions) < len(self._others) and time.monotonic() < deadline:
            self.check(waiting_in)
            time.sleep(POLL_S)
        return [rank for rank in self._others if rank not in self._positions]

    def _acknowledge(self) -> None:
        # Notify all ranks, because several may have failed at once, and each of them waits for all
        # others.
        self._send_all(SEEN, "")

    def _all_left(self) -> bool:
        return all(rank in self._left or rank in self.lost for rank in self._others)

    def _wait_at_exit(self, done: Callable[[], bool]) -> None:
        """Wait without a time-out, and periodically log which ranks have not exited."""
        while not self._wait_for(done, self._timeout_s):
            logger.warning(
                f"rank {self.rank} has ended its program and waits for rank {self._running()}"
            )

    def _running(self) -> str:
        """Return the ranks that have neither exited nor died."""
        return ", ".join(str(r) for r in self._others if r not in self._left and r not in self.lost)

    def _has_stopped(self, rank: int) -> bool:
        return self._stopped.get(rank, -1) >= self._generation

    def _wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Process messages until ``done()`` is true or the time is over; return ``done()``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._receive("the end of the program")
            if done():
                return True
            time.sleep(POLL_S)
        return False

    def _receive(self, waiting_in: str) -> None:
        status = self._mpi.Status()
        probes = PROBES if self._survives else 1
        while probes:
            try:
                message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
                if message is None:
                    probes -= 1
                    continue
                buffer = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                message.Recv([buffer, self._mpi.BYTE])
            except self._mpi.Exception as error:
                self.record_loss(error)
                continue
            # The sender may have cut the text in the middle of a character.
            text = buffer.tobytes().decode(errors="replace")
            self._handle(status.Get_source(), status.Get_tag(), text, waiting_in)

    def _handle(self, source: int, tag: int, text: str, waiting_in: str) -> None:
        if tag == FAILED:
            self._failure = self._failure or (source, text)
            self._seen.add(source)  # a failed rank need not be notified
        elif tag == SEEN:
            self._seen.add(source)
        elif tag == LEFT:
            self._left[source] = int(text)
        elif tag == ASK and waiting_in:
            self._send(source, ANSWER, waiting_in)
        elif tag == ANSWER:
            self._positions[source] = text
        elif tag == STOPPED:
            self._stopped[source] = int(text)

    def _send_all(self, tag: int, text: str) -> None:
        for rank in self._others:
            self._send(rank, tag, text)

    def _send(self, rank: int, tag: int, text: str) -> None:
        # Messages must be small enough for MPI's eager protocol, because the other rank may never
        # receive them.
        data = np.frombuffer(text.encode()[:2000] or b" ", np.uint8)
        self._pending = [entry for entry in self._pending if not self._is_over(entry[0])]
        try:
            request = self._comm.Isend([data, self._mpi.BYTE], rank, tag)
            self._pending.append((request, data))
        except self._mpi.Exception as error:
            self.record_loss(error)

    def _is_over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            self.record_loss(error)
            return True
