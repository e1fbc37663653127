"""A parameter server: holds a shard of the variables and answers workers until all are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.errors import CollectiveError, MismatchError, NonFiniteError, PeerLostError
from hvdtrain.parameter_server.consistency import Consistency
from hvdtrain.parameter_server.consistent_snapshot import ConsistentSnapshot
from hvdtrain.parameter_server.dc_asgd import DelayCompensation
from hvdtrain.parameter_server.gradient_aggregation import GradientAggregation
from hvdtrain.parameter_server.gradient_packing import Parts
from hvdtrain.parameter_server.liveness import WorkerLiveness
from hvdtrain.parameter_server.protocol import (
    DATA,
    NO_STAND,
    REFUSALS,
    REQUEST,
    Kind,
    Reply,
    Request,
)
from hvdtrain.parameter_server.reply_sender import ReplySender
from hvdtrain.parameter_server.sharding import Shard
from hvdtrain.parameter_server.shared_gradients import Slots
from hvdtrain.parameter_server.shared_weights import PublishedWeights
from hvdtrain.parameter_server.staleness_stats import StalenessStats
from hvdtrain.parameter_server.update_log import Origin, UpdateLog

__all__ = ["Server", "Variables"]

WAITING = "parameter server, for workers"


class Variables(Protocol):
    """What a server has of the model; see ``hvdtrain.parameter_server.shard_buffers``."""

    state_bytes: int
    paths: Sequence[str]
    """Of the variables that the shard's pieces belong to."""

    def learning_rate(self) -> float:
        """Of the next update."""
        ...

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

    Where ranks may be lost, the others go on without a worker that dies, and nobody waits for one
    that says nothing until it speaks again. Without the chief, or another server, nothing goes on.

    Args:
        messages: To the workers.
        variables: Of the shard, with their optimizer.
        shard: Which these are.
        published: Where their weights are put.
        readers: Workers that read them there; all others get them in messages.
        slots: By worker, where those whose memory is seen here put dense gradients.
        workers: By rank; the first is the chief.
        rule: Who may go on when.
        scale_by_staleness: Divide the learning rate of each update by the gradient's staleness
            (Zhang et al. 2016, arXiv 1511.05950), where that is above 1.
        tells_learning_rate: Let workers know that of the next update.
        delay_compensation: Strength of ``DelayCompensation`` for gradients that are applied one by
            one; 0 for none. It takes that nobody reads weights here, which may be newer than those
            of the answer.
        require_finite: Refuse gradients with NaN or infinity.
        log: Is told of each update.
        received: A signal that has come to this rank, or 0; the chief is told.
        silence_s: How long a worker may take for a step before it counts as silent.
        least_workers: Where fewer are left, training ends.
        tell: Called with a line on a worker that falls silent, or comes back.
    """

    def __init__(
        self,
        messages: PointToPoint,
        variables: Variables,
        shard: Shard,
        *,
        published: PublishedWeights,
        readers: Collection[int],
        slots: Mapping[int, Slots],
        workers: Sequence[int],
        rule: Consistency,
        scale_by_staleness: bool,
        tells_learning_rate: bool = False,
        delay_compensation: float = 0.0,
        require_finite: bool = True,
        log: UpdateLog | None = None,
        received: Callable[[], int] = lambda: 0,
        silence_s: float = math.inf,
        least_workers: int = 1,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._messages = messages
        self._variables = variables
        self._shard = shard
        self._rule = rule
        self._scale_by_staleness = scale_by_staleness
        self._tells_learning_rate = tells_learning_rate
        self._workers = tuple(workers)
        self._attendance = WorkerLiveness(workers, silence_s)
        self._silence_s = silence_s
        self._least_workers = least_workers
        self._gone = messages.lost.difference(workers)
        self._tell = tell
        self._received = received
        self._signal = 0  # that came to a worker
        self._freezing = ConsistentSnapshot(rule, workers)
        self._stands = dict.fromkeys(workers, NO_STAND)
        self._gathered_stands: dict[int, tuple[int, ...]] = {}
        self._loaded = False
        self._stop = False
        self._version = 0
        self._waiting: dict[int, bool] = {}  # for weights; whether that is the end
        self._answers = ReplySender(messages)
        self._published = published
        self._published_version = -1
        self._readers = frozenset(readers)
        self._slots = slots
        self._flat = BufferPool().take(shard.nbytes)  # aligned
        self._gathered = GradientAggregation()
        self._gathered_of: list[Origin] = []
        self._pushes = dict.fromkeys(workers, 0)
        self._log = log
        self._require_finite = require_finite
        compensates = delay_compensation > 0
        self._compensation = DelayCompensation(delay_compensation, shard) if compensates else None
        self.counts = StalenessStats()
        """What became of the gradients."""
        self.ended_by = 0
        """The signal by which the chief ended the training; 0 for none."""

    def serve(self) -> None:
        """Return when every worker is done.

        Raises:
            PeerFailedError: A rank failed, or one died that is no mere worker.
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
            Kind.STATE: self._tell_state,
        }
        while self._attendance.there or self._waiting:
            heard = self._freezing.next_held() or self._hear()
            if heard is not None and not self._freezing.holds(*heard):
                worker, request = heard
                try:
                    handlers[request.kind](worker, request)
                except REFUSALS as error:
                    self._refuse(worker, error)
                except PeerLostError:
                    pass  # in the middle of a request; who is lost is seen next
            self._see_who_is_there()
            self._answer()
        self._answers.finish()

    def _hear(self) -> tuple[int, Request] | None:
        """The next request; None where something else is to be seen to."""
        words = Request.buffer()
        silence_at = self._attendance.next_silence
        worker = self._messages.receive_any(
            words,
            REQUEST,
            WAITING,
            unless=lambda: self._has_news or time.monotonic() >= silence_at,
        )
        if worker is None or worker in self._gone:
            return None
        if self._attendance.hear(worker):
            self._rule.come_back(worker)
            self._tell(f"rank {worker} is back, and is waited for again")
        request = Request.unpack(words)
        if worker == self._chief:
            self.ended_by = request.signal
        else:
            self._signal = self._signal or request.signal
        return worker, request

    @property
    def _has_news(self) -> bool:
        return len(self._messages.lost) > len(self._gone)

    def _see_who_is_there(self) -> None:
        """Go on without workers that died, and wait for none that says nothing."""
        if self._has_news:
            for rank in sorted(self._messages.lost - self._gone):
                self._lose(rank)
        for worker in self._attendance.fall_silent(time.monotonic()):
            self._tell(
                f"rank {worker} has said nothing for {self._silence_s:g} s; the others wait for "
                "it no longer"
            )
            self._rule.leave(worker)
            self._complete()

    def _lose(self, rank: int) -> None:
        self._gone.add(rank)
        if rank == self._chief or rank not in self._workers:
            raise self._messages.loss_of(rank, "served the workers")
        self._attendance.end(rank)
        self._waiting.pop(rank, None)
        self._freezing.lose(rank)
        self._rule.leave(rank)
        self._stop = self._stop or len(set(self._workers) - self._gone) < self._least_workers
        self._complete()

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
        self._attendance.note_step(worker)
        if not math.isnan(request.learning_rate):
            self._variables.set_learning_rate(request.learning_rate)
        in_time = self._rule.push(worker, request.step)
        self._waiting[worker] = False
        if request.stand != NO_STAND:
            stands = self._gathered_stands if in_time and self._rule.gathers else self._stands
            stands[worker] = request.stand
        origin = Origin(worker, self._pushes[worker], request.version, request.weight)
        self._pushes[worker] += 1
        if parts is not None:
            self.counts.pushed[worker] += 1
        if parts is None:
            self._complete()
        elif not in_time:
            self.counts.late += 1
            if self._log is not None:
                self._log.late(origin)
        elif self._rule.gathers:
            self._gathered.add(parts, request.weight)
            self._gathered_of.append(origin)
            self.counts.taken += 1
            self._complete()
        else:
            staleness = self._version - request.version
            if self._compensation is not None and staleness:
                self._publish()
                parts = self._compensation.correct(worker, parts, self._published.newest)
            self._apply(parts, staleness, [origin])
            self.counts.taken += 1

    def _end(self, worker: int, request: Request) -> None:
        self._attendance.end(worker)
        self._waiting[worker] = True
        self._stop_training(worker, request)

    def _leave(self, worker: int, request: Request) -> None:
        self._stop_training(worker, request)
        self._reply(worker, [])

    def _stop_training(self, worker: int, request: Request) -> None:
        self._attendance.stop_training(worker)
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
        self._complete()

    def _tell_state(self, worker: int, request: Request) -> None:
        self._give_weights(worker, [self._variables.state()], these=True)

    def _complete(self) -> None:
        """Apply what was gathered, if it is all that there will be."""
        if self._freezing.may_advance and self._rule.complete():
            self._stands.update(self._gathered_stands)
            self._gathered_stands = {}
            mean = self._gathered.mean()
            made_of, self._gathered_of = self._gathered_of, []
            if mean is not None:
                self._apply(mean, 0, made_of)

    def _apply(self, gradients: Parts, staleness: int, made_of: Sequence[Origin]) -> None:
        factor = 1.0 / max(1, staleness) if self._scale_by_staleness else 1.0
        if self._log is not None:
            self._log.update(
                self._version + 1,
                made_of,
                staleness=staleness,
                learning_rate=self._variables.learning_rate(),
                factor=factor,
            )
        self._variables.apply(gradients, factor)
        self._version += 1
        self.counts.update(staleness)

    def _check(self, worker: int, request: Request) -> None:
        """See that a gradient may be applied.

        Raises:
            MismatchError: It belongs to other weights than there were.
        """
        if worker not in self._attendance.training:
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
            stands = np.array([self._stands[worker] for worker in self._workers], np.int64)
            self._give_weights(self._chief, [self._variables.state(), stands], these=True)
            self._freezing.end()
            self._complete()
        for worker, ends in list(self._waiting.items()):
            if not self._attendance.there if ends else self._rule.may_go_on(worker):
                del self._waiting[worker]
                chief = worker == self._chief
                self._give_weights(worker, [self._variables.state()] if ends and chief else [])

    @property
    def _chief(self) -> int:
        return self._workers[0]

    def _give_weights(
        self, worker: int, more: Sequence[np.ndarray], *, these: bool = False
    ) -> None:
        """Answer with the weights; send them to who doesn't read them.

        Args:
            worker: By rank.
            more: To be sent with them.
            these: Send them in any case: what is read may be newer.
        """
        self._publish()
        if self._compensation is not None:
            self._compensation.sent(worker, self._published.newest)
        reads = worker in self._readers and not these
        self._reply(worker, more if reads else [self._published.newest, *more])

    def _publish(self) -> None:
        if self._published_version != self._version:
            self._published.write(self._variables.weights, self._version)
            self._published_version = self._version

    def _refuse(self, worker: int, error: CollectiveError) -> None:
        self._waiting.pop(worker, None)
        # As many messages as it waits for; it doesn't look at what they hold.
        weights = [] if worker in self._readers else [self._published.newest]
        self._reply(worker, weights, str(error), REFUSALS.index(type(error)))

    def _reply(
        self, worker: int, data: Sequence[np.ndarray], refusal: str = "", error: int = 0
    ) -> None:
        chief = worker == self._chief
        rate = self._variables.learning_rate() if self._tells_learning_rate else math.nan
        reply = Reply(
            self._rule.next_step(worker),
            self._version,
            self._stop,
            refusal,
            signal=(self._signal or self._received()) if chief else self.ended_by,
            training=len(self._attendance.training),
            learning_rate=rate,
            error=error,
        )
        self._answers.send(worker, reply, data)
        self._attendance.answer(worker, time.monotonic())

    def _receive_gradients(self, worker: int) -> Parts:
        words = Parts.room_for_words(self._shard)
        self._receive(worker, [words])
        parts = Parts.expect(self._shard, words, self._flat, self._slots.get(worker, ()))
        self._receive(worker, list(parts.blocks()))
        parts.check()
        if self._require_finite:
            self._check_finite(worker, parts)
        return parts

    def _check_finite(self, worker: int, parts: Parts) -> None:
        """See that gradients are numbers.

        Raises:
            NonFiniteError: They aren't.
        """
        if bad := parts.non_finite():
            names = dict.fromkeys(self._variables.paths[number] for number in bad)
            raise NonFiniteError(
                f"Rank {worker} sent a gradient with NaN or infinity: {', '.join([*names][:5])}. "
                "It was not applied. Lower the learning rate, clip gradients or look at the data "
                "of that rank; HVDTRAIN_NON_FINITE=ignore lets such values through."
            )

    def _receive(self, worker: int, buffers: Sequence[np.ndarray]) -> None:
        messages = self._messages
        pending = [
            request
            for buffer in buffers
            for request in messages.start_receive(buffer, worker, DATA)
        ]
        messages.wait(pending, f"parameter server, for data of rank {worker}")
