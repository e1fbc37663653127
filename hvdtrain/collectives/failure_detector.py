"""A failure detector: ranks learn that one can't go on, while they wait for something else.

Messages travel on a communicator of their own. A rank that waits in a collective looks for them
every few milliseconds; nothing is sent while all is well. Where ranks may be lost, this is also
where it is noticed that one died. The communicator outlives that: ranks keep their first numbers.
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

FAILED, SEEN, LEFT, ASK, TELL, STOPPED = 1, 2, 3, 4, 5, 6

FAREWELL_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 3.0
# For the others to come to their end, after a program has ended with an exit code of its own.
EXIT_TIMEOUT_S = 1.0
POLL_S = 0.002
# Open MPI looks for news of ranks that died only now and then when it is called, and passes them
# on from rank to rank in the same way.
LOOKS = 16


class RanksLost(Exception):
    """The operation has to stop because a rank died; the engine catches it."""


def is_loss(mpi: ModuleType, error: Any) -> bool:
    """Whether an ``MPI.Exception`` says that a rank died, or that another rank has seen one die."""
    return error.Get_error_class() in (
        mpi.ERR_PROC_FAILED,
        mpi.ERR_PROC_FAILED_PENDING,
        mpi.ERR_REVOKED,
    )


class FailureDetector:
    """One rank's view of the others' troubles.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: A communicator of all ranks, used by nothing else.
        timeout_s: After that long ``leave`` says whom it waits for.
        operations: How many operations this rank has begun.
        survives: Whether the others go on when a rank dies.
        numbers: By which errors call the ranks, where these are some of the job's.
        detectors: The failure detectors of all engines of this process, to which this one is added:
            who waits in one engine answers what is asked in another.
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
        # All that died, whether or not they have been left behind already.
        self.lost: set[int] = set()
        self._generation = 0
        # Until which generation each rank has stopped its operations.
        self._stopped: dict[int, int] = {}
        self._failure: tuple[int, str] | None = None
        self._failed_myself = False
        self._seen: set[int] = set()
        # With how many operations each had taken part in: the last ones end at different times.
        self._left: dict[int, int] = {}
        self._told: dict[int, str] = {}
        self._silent: set[int] = set()
        self._pending: list[tuple[Any, np.ndarray]] = []

    def close(self) -> None:
        """Take this one out of use; all ranks do."""
        self.detectors.remove(self)
        self._comm.Free()

    def numbers_of(self, *ranks: int) -> str:
        """The numbers by which errors call these ranks."""
        return ", ".join(str(self._numbers[rank]) for rank in ranks)

    @property
    def failed(self) -> bool:
        """Whether this rank or another has failed."""
        return self._failed_myself or self._failure is not None

    def check(self, waiting_in: str, needs_all: bool = False) -> None:
        """Look for messages.

        Args:
            waiting_in: Where this rank is.
            needs_all: Whether that is no operation: no rank may leave meanwhile, and who waits
                looks at ``lost`` itself.

        Raises:
            PeerFailedError: A rank has failed, or has left while this one needs it.
            RanksLost: A rank died, and this one has not stopped its operation for that yet.
        """
        for detector in self.detectors:
            detector._receive(waiting_in)
        me = self.numbers_of(self.rank)
        if self._failure is not None:
            rank, reason = self._failure
            raise PeerFailedError(
                f"rank {self.numbers_of(rank)} failed: {reason}. Rank {me} was waiting for it in "
                f"{waiting_in} and stops too."
            )
        if self.interrupted and not needs_all and not self._have_stopped(self.rank):
            raise RanksLost
        here = self._operations()
        gone = sorted(
            rank for rank, operations in self._left.items() if needs_all or operations < here
        )
        if gone:
            raise PeerFailedError(
                f"rank {self.numbers_of(*gone)} ended its program while rank {me} "
                f"waits for it in {waiting_in}. Every rank must make the same calls; look for an "
                "early exit, or for a step that only some ranks take."
            )

    def time_out(self, waiting_in: str, timeout_s: float) -> None:
        """Ask where the other ranks are, and raise.

        Raises:
            CollectiveTimeoutError: Always; it names the ranks that did not arrive.
        """
        missing = self._ask(waiting_in)
        self._silent = set(missing)
        told = [
            f"rank {self.numbers_of(rank)} waits in {text}"
            for rank, text in sorted(self._told.items())
        ]
        if missing:
            told.append(
                f"rank {self.numbers_of(*missing)} waits in no collective: busy with something "
                "that the others are not doing, or hung"
            )
        raise CollectiveTimeoutError(
            f"rank {self.numbers_of(self.rank)} waited {timeout_s:g} s in {waiting_in}: "
            f"{'; '.join(told)}. If the work may take that long, raise HVDTRAIN_TIMEOUT_S."
        )

    def warn_of_wait(self, waiting_in: str, waited_s: float) -> None:
        """Log which ranks this one has been waiting for."""
        missing = self.numbers_of(*self._ask(waiting_in)) or "another rank"
        logger.warning(
            f"rank {self.numbers_of(self.rank)} has waited {waited_s:.0f} s in {waiting_in} for "
            f"rank {missing}"
        )

    def _ask(self, waiting_in: str) -> list[int]:
        """Ask where the other ranks are; return those that don't answer in time."""
        self._told.clear()
        self._send_all(ASK, "")
        deadline = time.monotonic() + ASK_TIMEOUT_S
        while len(self._told) < len(self._others) and time.monotonic() < deadline:
            self.check(waiting_in)
            time.sleep(POLL_S)
        return [rank for rank in self._others if rank not in self._told]

    def note_lost(
        self, error: Exception, comm: Any = None, members: Sequence[int] | None = None
    ) -> None:
        """Learn who died; looking for messages is an error until that is acknowledged.

        Args:
            error: What MPI raised; raised again where it says nothing of the kind.
            comm: Where it came up; the detector's own if not given.
            members: The first numbers of the ranks of ``comm``.
        """
        if not self._survives or not is_loss(self._mpi, error):
            raise error
        comm = comm or self._comm
        comm.Ack_failed()
        failed = comm.Get_failed().Translate_ranks(None, comm.Get_group())
        self.lost.update(failed if members is None else (members[rank] for rank in failed))

    @property
    def interrupted(self) -> bool:
        """Whether ranks of this generation are lost, or have stopped because of that."""
        return any(rank in self.lost or self._have_stopped(rank) for rank in self._others)

    @property
    def all_have_stopped(self) -> bool:
        """Whether no rank that is left is inside an operation of this generation."""
        return all(rank in self.lost or self._have_stopped(rank) for rank in self._others)

    def stop(self) -> None:
        """Tell the others that this rank has stopped because one was lost."""
        self._stopped[self.rank] = self._generation
        self._send_all(STOPPED, str(self._generation))

    def go_on(self, members: Sequence[int], generation: int) -> None:
        """Forget the ranks that are not among ``members``; they have been left behind."""
        self._generation = generation
        self._others = [rank for rank in members if rank != self.rank]
        self._left = {rank: self._left[rank] for rank in self._others if rank in self._left}

    def fail(self, reason: str) -> bool:
        """Tell all ranks that this one failed, and wait a little until they have seen it.

        Where ranks survive others, one that ended unheard would pass for dead, and they would go
        on: then this waits as long as for any operation.

        Returns:
            Whether no rank can be left that doesn't know.
        """
        if self._failed_myself:
            return True
        if self.tell_failure(reason):
            return True
        listening = set(self._others) - self._silent

        def heard() -> bool:
            return self._seen | self._left.keys() | self.lost >= listening

        timeout_s = self._timeout_s if self._survives else FAREWELL_TIMEOUT_S
        return self._wait_for(heard, timeout_s) and not self._silent

    def tell_failure(self, reason: str) -> bool:
        """Tell all ranks; where one has failed before, that this was seen, and return True."""
        self._failed_myself = True
        self._receive("")
        if self._failure is not None:
            # This failure only follows from the first one.
            self._tell_seen()
            return True
        self._send_all(FAILED, reason)
        return False

    def tell_end(self) -> None:
        """Tell all ranks that this one takes part in nothing any more."""
        self._send_all(LEFT, str(self._operations()))

    def leave(
        self, rejoin: Callable[[], None] = lambda: None, failing_code: int | None = None
    ) -> bool:
        """Wait at the end of the program until all ranks are there, however long that takes.

        Ending before would end them: mpirun takes a rank that has not finalised MPI for a failed
        one. A rank that is gone for good ends the whole job anyway, or is left behind.

        Args:
            rejoin: Leaves lost ranks behind, together with the others, once all have stopped.
            failing_code: With which the program ends; then the others are waited for only a moment,
                as its end is to end the job.

        Returns:
            Whether all ranks came to their end well, so that MPI may be finalised.
        """
        if self.failed:
            if not self._failed_myself:
                self._tell_seen()
            return False
        self.tell_end()

        def settled() -> bool:
            return self._all_left() or self._failure is not None or self.interrupted

        if failing_code is not None:
            if not self._wait_for(settled, EXIT_TIMEOUT_S):
                logger.error(
                    f"rank {self.rank} of {self.size} ends with exit code {failing_code}, before "
                    f"rank {self._still_there()}"
                )
            return self._all_left() and not self.lost and not self.failed
        while not self._all_left() and self._failure is None:
            if not self.interrupted:
                self._wait_at_the_end(settled)
                continue
            self.stop()
            self._wait_at_the_end(
                lambda: self._all_left() or self._failure is not None or self.all_have_stopped
            )
            if self.all_have_stopped and not self._all_left():
                rejoin()
        if self._failure is not None:
            self._tell_seen()
        return not self.lost and not self.failed

    def _tell_seen(self) -> None:
        # All: several may have failed at once, and each of them waits for word of every rank.
        self._send_all(SEEN, "")

    def _all_left(self) -> bool:
        return all(rank in self._left or rank in self.lost for rank in self._others)

    def _wait_at_the_end(self, done: Callable[[], bool]) -> None:
        """Wait without end, and say from time to time for whom."""
        while not self._wait_for(done, self._timeout_s):
            logger.warning(
                f"rank {self.rank} has ended its program and waits for rank {self._still_there()}"
            )

    def _still_there(self) -> str:
        """The ranks that have neither ended their program nor died."""
        missing = [r for r in self._others if r not in self._left and r not in self.lost]
        return ", ".join(map(str, missing))

    def _have_stopped(self, rank: int) -> bool:
        return self._stopped.get(rank, -1) >= self._generation

    def _wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``done`` is true; returns whether it came true within the time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._receive("the end of the program")
            if done():
                return True
            time.sleep(POLL_S)
        return False

    def _receive(self, waiting_in: str) -> None:
        status = self._mpi.Status()
        looks = LOOKS if self._survives else 1
        while looks:
            try:
                message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
                if message is None:
                    looks -= 1
                    continue
                buffer = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                message.Recv([buffer, self._mpi.BYTE])
            except self._mpi.Exception as error:
                self.note_lost(error)
                continue
            # A text that was too long may end within a character.
            text = buffer.tobytes().decode(errors="replace")
            self._handle(status.Get_source(), status.Get_tag(), text, waiting_in)

    def _handle(self, source: int, tag: int, text: str, waiting_in: str) -> None:
        if tag == FAILED:
            self._failure = self._failure or (source, text)
            self._seen.add(source)  # who fails itself need not be told
        elif tag == SEEN:
            self._seen.add(source)
        elif tag == LEFT:
            self._left[source] = int(text)
        elif tag == ASK and waiting_in:
            self._send(source, TELL, waiting_in)
        elif tag == TELL:
            self._told[source] = text
        elif tag == STOPPED:
            self._stopped[source] = int(text)

    def _send_all(self, tag: int, text: str) -> None:
        for rank in self._others:
            self._send(rank, tag, text)

    def _send(self, rank: int, tag: int, text: str) -> None:
        # A message has to fit the eager protocol: nobody may be there to receive it.
        data = np.frombuffer(text.encode()[:2000] or b" ", np.uint8)
        self._pending = [entry for entry in self._pending if not self._is_over(entry[0])]
        try:
            request = self._comm.Isend([data, self._mpi.BYTE], rank, tag)
            self._pending.append((request, data))
        except self._mpi.Exception as error:
            self.note_lost(error)

    def _is_over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            self.note_lost(error)
            return True
