"""Recovery from dead ranks, inside the operation that notices them.

An operation ends in two steps. First, a rank gets its result. Then it waits until all ranks have
their results, and returns. So when a rank dies, there are two cases, and the remaining ranks agree
on which case it is:

- All remaining ranks have their result. The operation is complete, and ranks that are still in it
  return their result.
- Some remaining ranks don't have their result yet. Then no rank has returned, and all remaining
  ranks repeat the operation without the dead ranks.

This needs no saved state, and works even if each rank gets a different result. No rank can be more
than one operation ahead of another, because a rank starts its next operation only once all ranks
have the result of this one.

To agree, a rank that notices a death revokes the communicators. This interrupts all ranks that wait
on a communicator. The rank then notifies the other ranks that it has stopped. If another rank is
computing outside of any operation, the stopped ranks wait until it starts its next operation.
Meanwhile they still detect failures. Once all ranks have stopped, they shrink the communicator
(ULFM: Bland et al. 2013, "Post-failure recovery of MPI communication capability"), exchange their
states, and set up everything that depends on the ranks. If another rank dies in the meantime, they
start over.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

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

__all__ = [
    "Recovery",
    "RecoveryDecision",
    "RecoveryState",
    "await_messages",
    "decide_recovery",
]

# After an error whose cause is not clear, wait this long for the news that a rank died.
NEWS_S = 2.0

Result = TypeVar("Result")


class RecoveryState(NamedTuple):
    """The state of a rank at the moment when it stopped."""

    member: int  # the initial rank
    operation: int  # number of the rank's current or latest operation
    completed: int  # number of the latest operation whose result the rank has
    # Initial rank, such as the root of a broadcast, without which the operation can't be repeated.
    # -1 if there is no such rank.
    source: int


class RecoveryDecision(NamedTuple):
    """The decision how to continue after a loss. It is the same on all remaining ranks."""

    complete: int  # number of the latest operation whose result all ranks have
    # number of the operation that can't be repeated because its ``source`` was lost; 0 if there is
    # no such operation
    orphaned: int


def decide_recovery(states: Sequence[RecoveryState]) -> RecoveryDecision:
    """Decide from the states of all remaining ranks how to continue.

    All ranks get the same decision, because they pass the same states.

    Raises:
        CollectiveError: If the ranks are not in step.
    """
    complete = min(state.completed for state in states)
    interrupted = complete + 1
    if any(state.operation > interrupted for state in states):
        raise CollectiveError(
            f"Ranks are not in step after a loss: all should be in operation {interrupted} or "
            f"before, got {list(states)}. This is a bug in hvdtrain."
        )
    members = {state.member for state in states}
    sources = {state.source for state in states if state.operation == interrupted}
    return RecoveryDecision(complete, interrupted if sources - members - {-1} else 0)


def await_messages(mpi: ModuleType, requests: list[Any]) -> None:
    """Wait for messages, or raise an MPI error if a rank that sends or receives one has died."""
    # Without statuses, Open MPI 5.0 returns as if the messages of a dead rank had arrived.
    mpi.Request.Waitall(requests, [])


class Recovery:
    """Runs the operations of an ``MpiTransport``, and repeats them after losses.

    This class sets ``too_few`` once fewer than ``min_np`` ranks remain.
    """

    def __init__(
        self,
        mpi: ModuleType,
        transport: Any,
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
        self._completed = 0
        self._decision = RecoveryDecision(0, 0)

    def run(self, operation: int, call: Call, attempt: Callable[[], Result], source: int) -> Result:
        """Repeat an operation until it has succeeded on all remaining ranks.

        If the operation can't be repeated without a certain rank, such as the root of a broadcast,
        ``source`` is the initial rank of that rank. Otherwise ``source`` is -1.

        Raises:
            RanksLostError: On all ranks, if ``source`` was lost.
        """
        # MPI may still write to the buffers of a failed attempt. The frames of the attempt's error
        # keep the buffers alive until a later attempt has received all messages from the other
        # ranks.
        errors: list[BaseException] = []
        try:
            while operation != self._decision.orphaned:
                try:
                    members = self._transport.ranks.members
                    result = _catch_common(attempt)
                    self._completed = operation
                    self._transport.ranks.contributed = members
                    self._transport.confirm(call)
                    return _raise_common(result)
                except (self._mpi.Exception, RanksLost) as error:
                    errors.append(error)
                    self._check_is_loss(error, call)
                    self._stop(call)
                    self._reconnect(
                        RecoveryState(self._detector.rank, operation, self._completed, source)
                    )
                if operation <= self._decision.complete:
                    return _raise_common(result)
            self._completed = operation
        finally:
            errors.clear()
        raise RanksLostError(
            f"The root of {call.text} died before all ranks had its value. Call it again with "
            "another root, or pass replicated=True if all ranks have the value."
        )

    def rejoin(self) -> None:
        """Remove lost ranks from the job while no collective runs on the remaining ranks."""
        self._transport.revoke()
        # A program that is exiting can't start threads.
        self._reconnect(
            RecoveryState(self._detector.rank, self._completed, self._completed, -1), threaded=False
        )

    def _check_is_loss(self, error: Any, call: Call) -> None:
        """Raise ``error`` unless a lost rank caused it."""
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
        """Stop the operation, and wait until all other ranks have stopped."""
        self._transport.revoke()
        self._detector.stop()
        self._spin_wait.until(lambda: self._detector.all_stopped, call.short_text)

    def _reconnect(self, state: RecoveryState, threaded: bool = True) -> None:
        """Set up the transport for the remaining ranks. All remaining ranks must call this."""
        states: list[RecoveryState] = []

        def shrink() -> None:
            states.extend(self._shrink(state))

        if threaded:
            self._run_with_timeout(shrink)
        else:
            shrink()
        ranks = self._transport.ranks
        ranks.generation += 1
        self._detector.resume(ranks.members, ranks.generation)
        self._decision = decide_recovery(states)
        left = len(ranks.members)
        if left < self._min_np:
            lost = sorted(set(range(self._detector.size)) - set(ranks.members))
            ranks.too_few = TooFewRanksError(
                f"{left} of {self._detector.size} ranks are left, rank {', '.join(map(str, lost))} "
                f"died, and training needs at least {self._min_np} (HVDTRAIN_MIN_NP, hvdtrain run "
                "--min-np). Start it again with enough ranks."
            )

    def _shrink(self, state: RecoveryState) -> list[RecoveryState]:
        """Connect the remaining ranks and return their states."""
        comm = self._transport.comm
        while True:
            fresh = comm.Shrink()
            states: list[RecoveryState] = []
            try:
                own = np.array(state, np.int64)
                everyone = np.empty((fresh.Get_size(), own.size), np.int64)
                await_all = functools.partial(await_messages, self._mpi)
                exchange = DirectExchange(self._mpi, fresh, await_all)
                exchange.allgather(as_bytes(own), as_bytes(everyone), [own.nbytes] * len(everyone))
                states = [RecoveryState(*map(int, row)) for row in everyone]
                self._transport.connect(fresh, [other.member for other in states])
                done = True
            except self._mpi.Exception:
                fresh.Revoke()
                done = False
            if self._agree_that(done, fresh):
                return states

    def _agree_that(self, done: bool, comm: Any) -> bool:
        """Return whether ``done`` is true on all ranks, even if a rank dies meanwhile."""
        try:
            return bool(comm.Agree(int(done)))
        except self._mpi.Exception:
            return False

    def _run_with_timeout(self, function: Callable[[], None]) -> None:
        """Run a function in a thread, because MPI calls can't be interrupted."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise CollectiveTimeoutError(
                f"After a rank was lost, the others did not reconnect within {self._timeout_s:g} "
                "s. If the hosts are that slow, raise HVDTRAIN_TIMEOUT_S."
            )
        if raised:
            raise raised[0]


def _catch_common(attempt: Callable[[], Result]) -> Result | MismatchError | RanksRaised:
    """Run ``attempt``. If all ranks raise the same error, return the error instead of raising it.

    The error is then treated like a result: either all ranks raise it, or the operation is
    repeated.
    """
    try:
        return attempt()
    except (MismatchError, RanksRaised) as error:
        return error


def _raise_common(result: Result | MismatchError | RanksRaised) -> Result:
    if isinstance(result, (MismatchError, RanksRaised)):
        raise result
    return result
