"""Going on without ranks that died, from inside the operation in which they are missed.

An operation ends on a rank in two steps. First the rank holds its result; then it waits until all
hold theirs, and only then does it return. So whatever moment a rank dies at, those that are left
are in one of two cases, and all come to know in which:

- Every one of them holds its result. The operation is complete: whoever is still in it returns
  what it holds.
- One of them doesn't. Then none has returned from the operation either, and all that are left do
  it again, as if they alone had called it.

Nothing has to be kept or handed over, and it holds for operations whose results differ by rank.
Nor can a rank be more than one operation ahead of another: it begins the next one only when all
hold the result of this one.

How they come to know. Who misses a rank revokes the communicators, which ends all waiting on
them, and tells the others that it has stopped. That takes as long as one of them computes outside
of any operation; failures are looked for meanwhile. When all have stopped they shrink the
communicator (ULFM: Bland et al. 2013, "Post-failure recovery of MPI communication capability"),
tell each other where they stand, and set up what depends on who they are. Should another rank die
during that, they agree to begin again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from hvdtrain.collectives.calls import Call, RanksRaised, as_bytes
from hvdtrain.collectives.direct_exchange import DirectExchange
from hvdtrain.collectives.failure_detector import POLL_S, FailureDetector, RanksLost, is_loss
from hvdtrain.collectives.waits import SpinWait
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    RanksLostError,
    TooFewRanksError,
)

__all__ = ["Recovery", "RecoveryDecision", "RecoveryState", "Survivor", "decide_recovery"]

# An error that doesn't say that a rank died may come before the news of it.
NEWS_S = 2.0

Result = TypeVar("Result")


class RecoveryState(NamedTuple):
    """The state of a rank when it stopped: where it was, and which result it held.

    ``member`` is its first number; ``operation`` the one that it is in, or was in last; ``held``
    the last one whose result it holds; ``source`` the member without which the operation can't
    be done, or -1.
    """

    member: int
    operation: int
    held: int
    source: int


class RecoveryDecision(NamedTuple):
    """The decision on what becomes of the operations that a loss has interrupted.

    Up to ``complete`` every rank has its result. ``orphaned`` is the operation, if it is not 0,
    that can't be done any more.
    """

    complete: int
    orphaned: int


def decide_recovery(states: Sequence[RecoveryState]) -> RecoveryDecision:
    """Decide from where all ranks that are left stand; the same on all of them.

    Raises:
        CollectiveError: A rank is further than it can be.
    """
    complete = min(state.held for state in states)
    interrupted = complete + 1
    if any(state.operation > interrupted for state in states):
        raise CollectiveError(
            f"After a rank was lost the others are not in step: {list(states)}. Expected all in "
            f"operation {interrupted} or before it; this is an error of hvdtrain."
        )
    members = {state.member for state in states}
    sources = {state.source for state in states if state.operation == interrupted}
    return RecoveryDecision(complete, interrupted if sources - members - {-1} else 0)


class Survivor(Protocol):
    """The part of a transport that recovery needs."""

    comm: Any
    ranks: Any

    def connect(self, comm: Any, members: Sequence[int]) -> None:
        """Set up all that depends on who the ranks are; collective over ``comm``."""
        ...

    def confirm(self, call: Call) -> None:
        """Return when every rank holds its result of the operation."""
        ...

    def revoke(self) -> None:
        """End whatever any rank waits for on the transport's communicators."""
        ...


class Recovery:
    """Carries out the operations of one transport, however many ranks are lost in them.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        transport: Moves the bytes of the operations.
        detector: Tells of ranks that died, and stopped.
        spin_wait: Waits for the others to stop.
        min_np: Fewer ranks than that are too few.
        timeout_s: How long the others may take to set up things anew.
    """

    def __init__(
        self,
        mpi: ModuleType,
        transport: Survivor,
        detector: FailureDetector,
        spin_wait: SpinWait,
        min_np: int,
        timeout_s: float,
    ) -> None:
        self._mpi = mpi
        self._transport = transport
        self._detector = detector
        self._spin_wait = spin_wait
        self._min_np = min_np
        self._timeout_s = timeout_s
        self._held = 0
        self._decision = RecoveryDecision(0, 0)

    def carry_out(
        self, operation: int, call: Call, attempt: Callable[[], Result], source: int
    ) -> Result:
        """Make the attempt until it has succeeded on all ranks that are left.

        Args:
            operation: Its number, from 1.
            call: For errors.
            attempt: Carries it out among the ranks that there are then.
            source: The member without which it can't be done, or -1.

        Raises:
            RanksLostError: On all ranks alike, if ``source`` was lost.
        """
        # MPI may still write to the buffers of an attempt that failed. The frames of its error
        # hold them until another attempt has seen all of the others' messages.
        abandoned: list[BaseException] = []
        try:
            while operation != self._decision.orphaned:
                try:
                    members = self._transport.ranks.members
                    result = _result_of(attempt)
                    self._held = operation
                    self._transport.ranks.contributed = members
                    self._transport.confirm(call)
                    return _given(result)
                except (self._mpi.Exception, RanksLost) as error:
                    abandoned.append(error)
                    self._see_loss(error, call)
                    self._stop(call)
                    self._reconnect(
                        RecoveryState(self._detector.rank, operation, self._held, source)
                    )
                if operation <= self._decision.complete:
                    return _given(result)
            self._held = operation
        finally:
            abandoned.clear()
        raise RanksLostError(
            f"The rank whose value {call.text} gives to all died before all had it. Call it again "
            "with a rank that has the value; or, where any rank's would do, pass replicated=True."
        )

    def rejoin(self) -> None:
        """Leave lost ranks behind once all have stopped, outside of any operation."""
        self._transport.revoke()
        # A program that is ending can't start threads.
        self._reconnect(
            RecoveryState(self._detector.rank, self._held, self._held, -1), threaded=False
        )

    def _see_loss(self, error: Any, call: Call) -> None:
        """Return when the error comes of a lost rank; raise it otherwise."""
        if isinstance(error, RanksLost) or is_loss(self._mpi, error):
            return
        deadline = time.monotonic() + NEWS_S
        while time.monotonic() < deadline:
            try:
                self._detector.check(call.short_text)
            except RanksLost:
                return
            time.sleep(POLL_S)
        raise error

    def _stop(self, call: Call) -> None:
        """Stop, and wait until all others have."""
        self._transport.revoke()
        self._detector.stop()
        self._spin_wait.until(lambda: self._detector.all_have_stopped, call.short_text)

    def _reconnect(self, state: RecoveryState, threaded: bool = True) -> None:
        """Set up the transport for the ranks that are left; all of them do it at the same time."""
        states: list[RecoveryState] = []

        def act() -> None:
            states.extend(self._shrink(state))

        if threaded:
            self._within_time(act)
        else:
            act()
        ranks = self._transport.ranks
        ranks.generation += 1
        self._detector.go_on(ranks.members, ranks.generation)
        self._decision = decide_recovery(states)
        left = len(ranks.members)
        if left < self._min_np:
            lost = sorted(set(range(self._detector.size)) - set(ranks.members))
            ranks.too_few = TooFewRanksError(
                f"{left} of {self._detector.size} ranks are left, rank {', '.join(map(str, lost))} "
                f"died, and training should go on with at least {self._min_np} "
                "(HVDTRAIN_MIN_NP, hvdtrain run --min-np). Start it again where there are enough."
            )

    def _shrink(self, state: RecoveryState) -> list[RecoveryState]:
        """Connect the ranks that are left; returns where all of them stand."""
        comm = self._transport.comm
        while True:
            fresh = comm.Shrink()
            states: list[RecoveryState] = []
            try:
                mine = np.array(state, np.int64)
                everyone = np.empty((fresh.Get_size(), mine.size), np.int64)
                exchange = DirectExchange(self._mpi, fresh, self._mpi.Request.Waitall)
                exchange.allgather(
                    as_bytes(mine), as_bytes(everyone), [mine.nbytes] * len(everyone)
                )
                states = [RecoveryState(*map(int, row)) for row in everyone]
                self._transport.connect(fresh, [other.member for other in states])
                done = True
            except self._mpi.Exception:
                fresh.Revoke()
                done = False
            if self._agree_that(done, fresh):
                return states

    def _agree_that(self, done: bool, comm: Any) -> bool:
        """Whether it is done on all ranks; they get the same answer, whoever dies meanwhile."""
        try:
            return bool(comm.Agree(int(done)))
        except self._mpi.Exception:
            return False

    def _within_time(self, act: Callable[[], None]) -> None:
        """Act in a thread, as MPI offers no other way to stop waiting."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                act()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise CollectiveTimeoutError(
                f"A rank was lost, and the others did not find together within "
                f"{self._timeout_s:g} s. If the hosts are that slow, raise HVDTRAIN_TIMEOUT_S."
            )
        if raised:
            raise raised[0]


def _result_of(attempt: Callable[[], Result]) -> Result | MismatchError | RanksRaised:
    """Return errors of all ranks as a result, too: all ranks are to have it, or none."""
    try:
        return attempt()
    except (MismatchError, RanksRaised) as error:
        return error


def _given(result: Result | MismatchError | RanksRaised) -> Result:
    if isinstance(result, (MismatchError, RanksRaised)):
        raise result
    return result
