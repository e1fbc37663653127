"""A parameter server: holds a shard of the variables and answers workers until all are done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hvdtrain.collectives.layout import BufferPool
from hvdtrain.collectives.messages import Messages
from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.counts import Counts
from hvdtrain.parameter_server.freezing import Freezing
from hvdtrain.parameter_server.gathering import Gathering
from hvdtrain.parameter_server.gradients import Parts
from hvdtrain.parameter_server.protocol import (
    DATA,
    NO_STAND,
    REPLY,
    REPLY_DATA,
    REQUEST,
    Kind,
    Reply,
    Request,
)
from hvdtrain.parameter_server.rules import Rule
from hvdtrain.parameter_server.shards import Shard

__all__ = ["Server", "Variables"]

WAITING = "parameter server, for workers"


class Variables(Protocol):
    """What a server has of the model; see ``hvdtrain.parameter_server.holding``."""

    state_bytes: int

    def set_learning_rate(self, rate: float) -> None:
        """From the next update on."""
        ...

    def weights(self, buffer: np.ndarray) -> None:
        """Copy the weights to a flat buffer."""
        ...

    def load(self, weights: np.ndarray, state: np.ndarray) -> None:
        """Take weights and the optimizer's state from flat buffers."""
        ...

    def state(self) -> np.ndarray:
        """The optimizer's state as a flat buffer."""
        ...

    def apply(self, gradients: Parts, learning_rate_factor: float = 1.0) -> None:
        """Update the weights."""
        ...


class Server:
    """Serves one ``fit``.

    A request is carried out as a whole before the next one is looked at, so that a few buffers are
    enough for any number of workers.

    Args:
        messages: To the workers.
        variables: Of the shard, with their optimizer.
        shard: Which these are.
        workers: By rank; the first is the chief.
        rule: Who may go on when.
        scale_by_staleness: Divide the learning rate of each update by the gradient's staleness
            (Zhang et al. 2016, arXiv 1511.05950), where that is above 1.
        received: A signal that has come to this rank, or 0; the chief is told.
    """

    def __init__(
        self,
        messages: Messages,
        variables: Variables,
        shard: Shard,
        *,
        workers: Sequence[int],
        rule: Rule,
        scale_by_staleness: bool,
        received: Callable[[], int] = lambda: 0,
    ) -> None:
        self._messages = messages
        self._variables = variables
        self._shard = shard
        self._rule = rule
        self._scale_by_staleness = scale_by_staleness
        self._workers = tuple(workers)
        self._active = set(workers)
        self._training = set(workers)
        self._received = received
        self._signal = 0  # that came to a worker
        self._freezing = Freezing(rule)
        self._stands = dict.fromkeys(workers, NO_STAND)
        self._gathered_stands: dict[int, tuple[int, ...]] = {}
        self._loaded = False
        self._stop = False
        self._version = 0
        self._waiting: dict[int, bool] = {}  # for weights; whether that is the end
        pool = BufferPool()  # aligned
        self._weights = pool.take(shard.nbytes)
        self._weights_version = -1
        self._flat = pool.take(shard.nbytes)
        self._gathered = Gathering()
        self.counts = Counts()
        """What became of the gradients."""
        self.ended_by = 0
        """The signal by which the chief ended the training; 0 for none."""

    def serve(self) -> None:
        """Return when every worker is done.

        Raises:
            PeerFailedError: A rank failed.
            CollectiveTimeoutError: No worker said anything for too long.
        """
        handlers: dict[Kind, Callable[[int, Request], None]] = {
            Kind.LOAD: self._load,
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.DONE: self._end,
            Kind.LOOK: self._look,
            Kind.LEAVE: self._leave,
            Kind.FREEZE: self._freeze,
            Kind.SNAPSHOT: self._aim,
        }
        while self._active or self._waiting:
            worker, request = self._freezing.next_held() or self._hear()
            if self._freezing.holds(worker, request):
                continue
            try:
                handlers[request.kind](worker, request)
            except MismatchError as error:
                self._refuse(worker, str(error))
            self._answer()

    def _hear(self) -> tuple[int, Request]:
        words = Request.buffer()
        worker = self._messages.receive_any(words, REQUEST, WAITING)
        request = Request.unpack(words)
        if worker == self._chief:
            self.ended_by = request.signal
        else:
            self._signal = self._signal or request.signal
        return worker, request

    def _load(self, worker: int, request: Request) -> None:
        state = np.empty(self._variables.state_bytes, np.uint8)
        self._receive(worker, [self._flat, state])
        self._variables.load(self._flat, state)
        self._loaded = True
        self._version += 1
        self._waiting[worker] = False

    def _pull(self, worker: int, request: Request) -> None:
        self._waiting[worker] = False

    def _push(self, worker: int, request: Request) -> None:
        parts = self._receive_gradients(worker) if request.counts else None
        self._check(worker, request)
        if not math.isnan(request.learning_rate):
            self._variables.set_learning_rate(request.learning_rate)
        in_time = self._rule.push(worker, request.step)
        self._waiting[worker] = False
        if request.stand != NO_STAND:
            stands = self._gathered_stands if in_time and self._rule.gathers else self._stands
            stands[worker] = request.stand
        if parts is None:
            self._complete()
        elif not in_time:
            self.counts.late += 1
        elif self._rule.gathers:
            self._gathered.add(parts, request.weight)
            self.counts.taken += 1
            self._complete()
        else:
            self._apply(parts, self._version - request.version)
            self.counts.taken += 1

    def _end(self, worker: int, request: Request) -> None:
        self._active.discard(worker)
        self._waiting[worker] = True
        self._stop_training(worker, request)

    def _leave(self, worker: int, request: Request) -> None:
        self._stop_training(worker, request)
        self._reply(worker, [])

    def _stop_training(self, worker: int, request: Request) -> None:
        self._training.discard(worker)
        self._rule.leave(worker)
        self._stop = self._stop or request.stop
        self._complete()

    def _look(self, worker: int, request: Request) -> None:
        self._reply(worker, [])

    def _freeze(self, worker: int, request: Request) -> None:
        self._reply(worker, [np.array(self._freezing.begin(), np.int64)])

    def _aim(self, worker: int, request: Request) -> None:
        limit = np.empty(len(self._workers), np.int64)
        self._receive(worker, [limit])
        self._freezing.aim(limit.tolist())

    def _complete(self) -> None:
        """Apply what was gathered, if it is all that there will be."""
        if self._rule.complete():
            self._stands.update(self._gathered_stands)
            self._gathered_stands = {}
            mean = self._gathered.mean()
            if mean is not None:
                self._apply(mean, 0)

    def _apply(self, gradients: Parts, staleness: int) -> None:
        factor = 1.0 / max(1, staleness) if self._scale_by_staleness else 1.0
        self._variables.apply(gradients, factor)
        self._version += 1
        self.counts.update(staleness)

    def _check(self, worker: int, request: Request) -> None:
        """See that a gradient may be applied.

        Raises:
            MismatchError: It belongs to other weights than there were.
        """
        if worker not in self._training:
            raise MismatchError(
                f"Rank {worker} sent a gradient after it had said that it was done."
            )
        if not 0 <= request.version <= self._version:
            raise MismatchError(
                f"Rank {worker} sent a gradient for version {request.version} of the weights; "
                f"expected one of 0 to {self._version}."
            )

    def _answer(self) -> None:
        """Let go on who may."""
        if not self._loaded:
            return
        if self._freezing.reached:
            self._copy_weights()
            stands = np.array([self._stands[worker] for worker in self._workers], np.int64)
            self._reply(self._chief, [self._weights, self._variables.state(), stands])
            self._freezing.end()
        for worker, ends in list(self._waiting.items()):
            if not self._active if ends else self._rule.may_go_on(worker):
                del self._waiting[worker]
                self._copy_weights()
                chief = worker == self._chief
                state = [self._variables.state()] if ends and chief else []
                self._reply(worker, [self._weights, *state])

    @property
    def _chief(self) -> int:
        return self._workers[0]

    def _copy_weights(self) -> None:
        if self._weights_version != self._version:
            self._variables.weights(self._weights)
            self._weights_version = self._version

    def _refuse(self, worker: int, refusal: str) -> None:
        self._waiting.pop(worker, None)
        # As many messages as it waits for; it doesn't look at what they hold.
        self._reply(worker, [self._weights], refusal)

    def _reply(self, worker: int, data: Sequence[np.ndarray], refusal: str = "") -> None:
        chief = worker == self._chief
        words = Reply(
            self._rule.next_step(worker),
            self._version,
            self._stop,
            refusal,
            signal=(self._signal or self._received()) if chief else self.ended_by,
            training=len(self._training),
        ).pack()
        pending = self._messages.start_send(words, worker, REPLY)
        for part in data:
            pending += self._messages.start_send(part, worker, REPLY_DATA)
        self._messages.wait(pending, f"parameter server, for rank {worker} to take its answer")

    def _receive_gradients(self, worker: int) -> Parts:
        kinds = np.empty(len(self._shard.pieces), np.int64)
        self._receive(worker, [kinds])
        parts = Parts.expect(self._shard, kinds, self._flat)
        self._receive(worker, list(parts.blocks()))
        parts.check()
        return parts

    def _receive(self, worker: int, buffers: Sequence[np.ndarray]) -> None:
        messages = self._messages
        pending = [
            request
            for buffer in buffers
            for request in messages.start_receive(buffer, worker, DATA)
        ]
        messages.wait(pending, f"parameter server, for data of rank {worker}")
