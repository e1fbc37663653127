"""A parameter server: holds a shard of the variables and serves workers until all are done."""

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

    A server handles one request completely before it receives the next one. The memory for receive
    buffers therefore does not depend on the number of workers.

    In an elastic job, training continues without workers that die. A worker that sends no requests
    is called silent. Other workers don't wait for a silent worker until it sends a request again.
    If the chief or another server dies, ``serve`` raises an error.
    """

    messages: PointToPoint  # the connection to the workers
    updates: ShardUpdates  # the updates of this server's shard
    # Memory shared with workers on this host. Workers on other hosts send gradients and receive
    # weights in messages.
    memory: SharedMemory
    _: KW_ONLY
    workers: Sequence[int]  # The ranks that train. The first one is the chief.
    consistency: Consistency  # decides when workers may proceed
    require_finite: bool = True  # whether to refuse gradients with NaN or infinity
    # Function that returns the number of a signal that this rank received, or 0. The server
    # forwards the signal to the chief.
    received_signal: Callable[[], int] = lambda: 0
    # seconds without a request after which a worker is considered silent
    silence_s: float = math.inf
    least_workers: int = 1  # Minimum number of workers. Training ends when fewer are left.
    # called with a line of text when a worker becomes silent, and when it sends a request again
    warn: Callable[[str], None] = lambda line: None
    # the signal with which the chief ended the training, or 0
    ended_by: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        workers, messages = self.workers, self.messages
        self._chief = workers[0]
        self._shard = self.updates.table.shard
        self._liveness = WorkerLiveness(workers, self.silence_s)
        self._lost = messages.lost.difference(workers)
        self._signal = 0  # a signal that a worker received
        self._snapshot = ConsistentSnapshot(self.consistency, workers)
        self._positions = dict.fromkeys(workers, NO_POSITION)
        self._gathered_positions: dict[int, tuple[int, ...]] = {}
        self._loaded = False
        self._stop = False
        self._waiting: dict[int, bool] = {}  # workers that wait for weights; True after END
        self._replies = ReplySender(messages)
        self._flat = BufferPool().take(self._shard.nbytes)  # aligned
        self._pushes = dict.fromkeys(workers, 0)

    def serve(self) -> None:
        """Serve until every worker is done.

        Raises:
            PeerFailedError: If a rank failed, or if the chief or another server died.
            CollectiveTimeoutError: If no request came in time.
        """
        while self._liveness.connected or self._waiting:
            entry = self._snapshot.next_held() or self._receive_request()
            if entry is not None and not self._snapshot.hold(*entry):
                worker, request = entry
                try:
                    self._handle(worker, request)
                except REFUSALS as error:
                    self._refuse(worker, error)
                except PeerLostError:
                    pass  # the worker died during its request; handled next
            self._check_liveness()
            self._send_replies()
        self._replies.finish()

    def _handle(self, worker: int, request: Request) -> None:
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
                self._liveness.disconnect(worker)
                if worker in self._waiting:
                    # The worker abandoned a push, but still expects the reply to it first.
                    self._reply_with_weights(worker, [])
                self._waiting[worker] = True
                self._stop_training(worker, request)
            case Kind.STATUS:
                self._reply(worker, [])
            case Kind.LEAVE:
                self._stop_training(worker, request)
                self._reply(worker, [])
            case Kind.FREEZE:
                self._reply(worker, [np.array(self._snapshot.freeze(), np.int64)])
            case Kind.SNAPSHOT:
                target = np.empty(len(self.workers), np.int64)
                self._receive(worker, [target])
                self._snapshot.resume_to(target.tolist())
                self._complete_step()
            case Kind.AVERAGES:
                averages = self.updates.state_buffer(averages_only=True)
                self._reply_with_weights(worker, [averages], exact=True)

    def _receive_request(self) -> tuple[int, Request] | None:
        """Return the next request, or None if a worker was lost or has become silent meanwhile."""
        buffer, messages = Request.buffer(), self.messages
        silence_at_s = self._liveness.next_silence_s

        def interrupted() -> bool:
            return len(messages.lost) > len(self._lost) or time.monotonic() >= silence_at_s

        worker = messages.receive_any(buffer, REQUEST, WAITING, unless=interrupted)
        if worker is None or worker in self._lost:
            return None
        if self._liveness.note_request(worker):
            self.consistency.rejoin(worker)
            self.warn(f"rank {worker} is back, and others wait for it again")
        request = Request.unpack(buffer)
        if worker == self._chief:
            self.ended_by = request.signal
        else:
            self._signal = self._signal or request.signal
        return worker, request

    def _check_liveness(self) -> None:
        for rank in sorted(self.messages.lost - self._lost):
            self._drop_worker(rank)
        for worker in self._liveness.mark_silent(time.monotonic()):
            self.warn(
                f"rank {worker} has been silent for {self.silence_s:g} s; others no longer wait "
                "for it"
            )
            self.consistency.leave(worker)
            self._complete_step()

    def _drop_worker(self, rank: int) -> None:
        self._lost.add(rank)
        if rank == self._chief or rank not in self.workers:
            raise self.messages.peer_lost_error(rank, "served the workers")
        self._liveness.disconnect(rank)
        self._waiting.pop(rank, None)
        self._snapshot.drop_worker(rank)
        self.consistency.leave(rank)
        self._stop = self._stop or len(set(self.workers) - self._lost) < self.least_workers
        self._complete_step()

    def _push(self, worker: int, request: Request) -> None:
        gradients = self._receive_gradients(worker) if request.has_gradient else None
        if not 0 <= request.version <= self.updates.version:
            raise MismatchError(
                f"Rank {worker} sent a gradient for version {request.version} of the weights; "
                f"expected 0 to {self.updates.version}."
            )
        self._liveness.stepped.add(worker)
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
            self._complete_step()
        elif not in_time:
            self.updates.drop(origin)
        elif gathers:
            self.updates.gather(gradients, origin)
            self._complete_step()
        else:
            self.updates.apply(gradients, origin)

    def _stop_training(self, worker: int, request: Request) -> None:
        self._liveness.stop_training(worker)
        self.consistency.leave(worker)
        self._stop = self._stop or request.stop
        self._complete_step()

    def _complete_step(self) -> None:
        """If the step is complete, apply the mean of its gradients."""
        if self._snapshot.may_advance and self.consistency.complete():
            self._positions.update(self._gathered_positions)
            self._gathered_positions = {}
            self.updates.apply_mean()

    def _send_replies(self) -> None:
        """Reply to all workers that may proceed to their next step."""
        if not self._loaded:
            return
        if self._snapshot.reached:
            positions = np.array([self._positions[worker] for worker in self.workers], np.int64)
            extra = [self.updates.state_buffer(), positions]
            self._reply_with_weights(self._chief, extra, exact=True)
            self._snapshot.finish()
            self._complete_step()
        for worker, ends in list(self._waiting.items()):
            if not self._liveness.connected if ends else self.consistency.may_proceed(worker):
                del self._waiting[worker]
                sends_state = ends and worker == self._chief
                self._reply_with_weights(
                    worker, [self.updates.state_buffer()] if sends_state else []
                )

    def _reply_with_weights(
        self, worker: int, extra: Sequence[np.ndarray], *, exact: bool = False
    ) -> None:
        """Reply with the weights, followed by ``extra``.

        A worker that shares memory with this server reads the weights there, so they are not sent.
        If ``exact`` is true, the weights are sent to every worker, because shared memory may
        already contain newer weights.
        """
        weights = self.updates.publish()
        reads = worker in self.memory.readers and not exact
        self._reply(worker, extra if reads else [weights, *extra])

    def _refuse(self, worker: int, error: CollectiveError) -> None:
        self._waiting.pop(worker, None)
        # The worker expects the messages of any reply, and ignores the weights.
        weights = [] if worker in self.memory.readers else [self.updates.published.newest]
        self._reply(worker, weights, str(error), REFUSALS.index(type(error)))

    def _reply(
        self, worker: int, data: Sequence[np.ndarray], refusal: str = "", error: int = 0
    ) -> None:
        for_chief = worker == self._chief
        reply = Reply(
            self.consistency.next_step(worker),
            self.updates.version,
            self._stop,
            signal=(self._signal or self.received_signal()) if for_chief else self.ended_by,
            training=len(self._liveness.training),
            error=error,
            refusal=refusal,
        )
        self._replies.send(worker, reply, data)
        self._liveness.note_reply(worker, time.monotonic())

    def _receive_gradients(self, worker: int) -> ShardGradients:
        """Receive a worker's gradients."""
        header = np.empty(1 + len(self._shard.pieces), np.int64)
        self._receive(worker, [header])
        slots = self.memory.slots.get(worker, ())
        gradients = ShardGradients.from_header(self._shard, header, self._flat, slots)
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
        receive = self.messages.start_receive
        pending = [message for buffer in buffers for message in receive(buffer, worker, DATA)]
        self.messages.wait(pending, f"parameter server, for data of rank {worker}")
