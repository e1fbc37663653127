"""A parameter server: holds a shard of the variables and answers workers until all are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.errors import CollectiveError, MismatchError, NonFiniteError, PeerLostError
from hvdtrain.parameter_server.consistency import Consistency, ConsistentSnapshot, WorkerLiveness
from hvdtrain.parameter_server.gradients import ShardGradients
from hvdtrain.parameter_server.protocol import (
    DATA,
    NO_POSITION,
    REFUSALS,
    REQUEST,
    Kind,
    Reply,
    ReplySender,
    Request,
)
from hvdtrain.parameter_server.published_weights import SharedMemory
from hvdtrain.parameter_server.updates import Origin, ShardUpdates

__all__ = ["Server"]

WAITING = "parameter server, for workers"


@dataclass(eq=False)
class Server:
    """Serves one ``fit``.

    A request is carried out as a whole before the next one is looked at, so that a few buffers are
    enough for any number of workers.

    Where ranks may be lost, the others go on without a worker that dies, and nobody waits for one
    that says nothing until it speaks again. Without the chief, or another server, nothing goes on.

    Attributes:
        memory: What this rank shares with workers of its host. Those that don't read its weights
            there get them in messages, and send gradients.
        workers: The ranks that train; the first is the chief.
        require_finite: Refuse gradients with NaN or infinity.
        received: Returns a signal that has come to this rank, or 0; the chief is told.
        silence_s: How long a worker may take for a step before it counts as silent.
        least_workers: How many workers must be left; with fewer, training ends.
        tell: Called with a line on a worker that falls silent, or comes back.
        ended_by: The signal by which the chief ended the training; 0 for none.
    """

    messages: PointToPoint
    updates: ShardUpdates
    memory: SharedMemory
    _: KW_ONLY
    workers: Sequence[int]
    consistency: Consistency
    require_finite: bool = True
    received: Callable[[], int] = lambda: 0
    silence_s: float = math.inf
    least_workers: int = 1
    tell: Callable[[str], None] = lambda line: None
    ended_by: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._chief = self.workers[0]
        self._shard = self.updates.table.shard
        self._liveness = WorkerLiveness(self.workers, self.silence_s)
        self._lost = self.messages.lost.difference(self.workers)
        self._signal = 0  # that came to a worker
        self._snapshot = ConsistentSnapshot(self.consistency, self.workers)
        self._positions = dict.fromkeys(self.workers, NO_POSITION)
        self._gathered_positions: dict[int, tuple[int, ...]] = {}
        self._loaded = False
        self._stop = False
        self._waiting: dict[int, bool] = {}  # for weights; whether that is the end
        self._replies = ReplySender(self.messages)
        self._flat = BufferPool().take(self._shard.nbytes)  # aligned
        self._pushes = dict.fromkeys(self.workers, 0)

    def serve(self) -> None:
        """Return when every worker is done.

        Raises:
            PeerFailedError: A rank failed, or one died that is no mere worker.
            CollectiveTimeoutError: No worker said anything for too long.
        """
        while self._liveness.there or self._waiting:
            heard = self._snapshot.next_held() or self._hear()
            if heard is not None and not self._snapshot.holds(*heard):
                worker, request = heard
                try:
                    self._carry_out(worker, request)
                except REFUSALS as error:
                    self._refuse(worker, error)
                except PeerLostError:
                    pass  # in the middle of a request; who is lost is seen next
            self._see_who_is_there()
            self._answer()
        self._replies.finish()

    def _carry_out(self, worker: int, request: Request) -> None:
        match request.kind:
            case Kind.LOAD:
                state = np.empty_like(self.updates.state_buffer())
                self._receive(worker, [self._flat, state])
                self.updates.load(self._flat, state)
                self._loaded = True
                self._waiting[worker] = False
            case Kind.PULL:
                self._waiting[worker] = False
            case Kind.PUSH:
                self._push(worker, request)
            case Kind.END:
                self._end(worker, request)
            case Kind.LOOK:
                self._reply(worker, [])
            case Kind.LEAVE:
                self._stop_training(worker, request)
                self._reply(worker, [])
            case Kind.FREEZE:
                self._reply(worker, [np.array(self._snapshot.begin(), np.int64)])
            case Kind.SNAPSHOT:
                limit = np.empty(len(self.workers), np.int64)
                self._receive(worker, [limit])
                self._snapshot.aim(limit.tolist())
                self._complete()
            case Kind.STATE:
                self._give_weights(worker, [self.updates.state_buffer()], these=True)

    def _hear(self) -> tuple[int, Request] | None:
        """Returns the next request, or None where something else is to be seen to."""
        buffer, messages = Request.buffer(), self.messages
        silence_at = self._liveness.next_silence

        def has_news() -> bool:
            return len(messages.lost) > len(self._lost) or time.monotonic() >= silence_at

        worker = messages.receive_any(buffer, REQUEST, WAITING, unless=has_news)
        if worker is None or worker in self._lost:
            return None
        if self._liveness.hear(worker):
            self.consistency.come_back(worker)
            self.tell(f"rank {worker} is back, and is waited for again")
        request = Request.unpack(buffer)
        if worker == self._chief:
            self.ended_by = request.signal
        else:
            self._signal = self._signal or request.signal
        return worker, request

    def _see_who_is_there(self) -> None:
        """Go on without workers that died, and wait for none that says nothing."""
        for rank in sorted(self.messages.lost - self._lost):
            self._go_on_without(rank)
        for worker in self._liveness.fall_silent(time.monotonic()):
            self.tell(
                f"rank {worker} has said nothing for {self.silence_s:g} s; the others wait for "
                "it no longer"
            )
            self.consistency.leave(worker)
            self._complete()

    def _go_on_without(self, rank: int) -> None:
        self._lost.add(rank)
        if rank == self._chief or rank not in self.workers:
            raise self.messages.loss_of(rank, "served the workers")
        self._liveness.end(rank)
        self._waiting.pop(rank, None)
        self._snapshot.lose(rank)
        self.consistency.leave(rank)
        self._stop = self._stop or len(set(self.workers) - self._lost) < self.least_workers
        self._complete()

    def _push(self, worker: int, request: Request) -> None:
        gradients = self._receive_gradients(worker) if request.has_gradient else None
        self._check(worker, request)
        self._liveness.note_step(worker)
        rate, table = request.learning_rate, self.updates.table
        if not math.isnan(rate) and table.learning_rate != np.float32(rate):
            table.learning_rate = rate
        in_time = self.consistency.push(worker, request.step)
        gathers = self.consistency.gathers
        self._waiting[worker] = False
        if request.position != NO_POSITION:
            positions = self._gathered_positions if in_time and gathers else self._positions
            positions[worker] = request.position
        origin = Origin(worker, self._pushes[worker], request.version, request.weight)
        self._pushes[worker] += 1
        if gradients is None:
            self._complete()
        elif not in_time:
            self.updates.drop(origin)
        elif gathers:
            self.updates.gather(gradients, origin)
            self._complete()
        else:
            self.updates.apply(gradients, origin)

    def _end(self, worker: int, request: Request) -> None:
        self._liveness.end(worker)
        if worker in self._waiting:
            # It has given up waiting for an answer, which still comes before that to this request.
            self._give_weights(worker, [])
        self._waiting[worker] = True
        self._stop_training(worker, request)

    def _stop_training(self, worker: int, request: Request) -> None:
        self._liveness.stop_training(worker)
        self.consistency.leave(worker)
        self._stop = self._stop or request.stop
        self._complete()

    def _complete(self) -> None:
        """Apply what was gathered, if it is all that there will be."""
        if self._snapshot.may_advance and self.consistency.complete():
            self._positions.update(self._gathered_positions)
            self._gathered_positions = {}
            self.updates.apply_mean()

    def _check(self, worker: int, request: Request) -> None:
        """Raise MismatchError for a gradient of other weights than there were."""
        if worker not in self._liveness.training:
            raise MismatchError(
                f"Rank {worker} sent a gradient after it had said that it was done."
            )
        if not 0 <= request.version <= self.updates.version:
            raise MismatchError(
                f"Rank {worker} sent a gradient for version {request.version} of the weights; "
                f"expected one of 0 to {self.updates.version}."
            )

    def _answer(self) -> None:
        """Answer the workers that may go on."""
        if not self._loaded:
            return
        if self._snapshot.reached:
            positions = np.array([self._positions[worker] for worker in self.workers], np.int64)
            more = [self.updates.state_buffer(), positions]
            self._give_weights(self._chief, more, these=True)
            self._snapshot.end()
            self._complete()
        for worker, ends in list(self._waiting.items()):
            if not self._liveness.there if ends else self.consistency.may_go_on(worker):
                del self._waiting[worker]
                gives_state = ends and worker == self._chief
                self._give_weights(worker, [self.updates.state_buffer()] if gives_state else [])

    def _give_weights(
        self, worker: int, more: Sequence[np.ndarray], *, these: bool = False
    ) -> None:
        """Answer with the weights and more; send weights to who doesn't read them.

        ``these`` sends them in any case: what is read may be newer.
        """
        weights = self.updates.publish()
        reads = worker in self.memory.readers and not these
        self._reply(worker, more if reads else [weights, *more])

    def _refuse(self, worker: int, error: CollectiveError) -> None:
        self._waiting.pop(worker, None)
        # As many messages as it waits for; it doesn't look at what they hold.
        weights = [] if worker in self.memory.readers else [self.updates.published.newest]
        self._reply(worker, weights, str(error), REFUSALS.index(type(error)))

    def _reply(
        self, worker: int, data: Sequence[np.ndarray], refusal: str = "", error: int = 0
    ) -> None:
        reply = Reply(
            self.consistency.next_step(worker),
            self.updates.version,
            self._stop,
            signal=(self._signal or self.received()) if worker == self._chief else self.ended_by,
            training=len(self._liveness.training),
            error=error,
            refusal=refusal,
        )
        self._replies.send(worker, reply, data)
        self._liveness.answer(worker, time.monotonic())

    def _receive_gradients(self, worker: int) -> ShardGradients:
        """Returns a worker's gradients, as they may be applied.

        Raises:
            MismatchError: They are of another model.
            NonFiniteError: They hold NaN or infinity.
        """
        header = ShardGradients.header_buffer(self._shard)
        self._receive(worker, [header])
        slots = self.memory.slots.get(worker, ())
        gradients = ShardGradients.expect(self._shard, header, self._flat, slots)
        self._receive(worker, list(gradients.blocks()))
        gradients.check()
        if self.require_finite and (bad := gradients.non_finite()):
            paths = self.updates.table.paths
            names = dict.fromkeys(paths[number] for number in bad)
            raise NonFiniteError(
                f"Rank {worker} sent a gradient with NaN or infinity: {', '.join([*names][:5])}. "
                "It was not applied. Lower the learning rate, clip gradients or look at the data "
                "of that rank; HVDTRAIN_NON_FINITE=ignore lets such values through."
            )
        return gradients

    def _receive(self, worker: int, buffers: Sequence[np.ndarray]) -> None:
        messages = self.messages
        pending = [
            request
            for buffer in buffers
            for request in messages.start_receive(buffer, worker, DATA)
        ]
        messages.wait(pending, f"parameter server, for data of rank {worker}")
