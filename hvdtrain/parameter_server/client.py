"""The worker's side of parameter servers. It sends gradients to all servers, and gets weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np

from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.parameter_server.gradients import SENT, Gradient, pack_gradients
from hvdtrain.parameter_server.protocol import (
    NO_POSITION,
    POSITION_NUMBERS,
    REFUSALS,
    Kind,
    PendingRequest,
    Request,
    ServerHandle,
)
from hvdtrain.parameter_server.published_weights import GRADIENT_SLOTS, SharedMemory
from hvdtrain.parameter_server.sharding import Shard, Spec, assemble

__all__ = ["Client"]

_Blocks = Sequence[Sequence[np.ndarray]]


class Client:
    """One worker's connection to the servers of one ``fit``.

    Weights are returned as a list with an array for each trainable variable. All arrays of this
    list stay unchanged as long as the caller holds a reference to one of them.
    """

    def __init__(
        self,
        messages: PointToPoint,
        specs: Sequence[Spec],
        servers: Sequence[int],
        shards: Sequence[Shard],
        memory: SharedMemory,
    ) -> None:
        self.pushed = 0  # number of gradients that were sent
        self.stopped = False  # whether another worker stopped the training
        # The number of a signal that this worker received, or 0. It is sent with each request.
        self.own_signal = 0
        self.signal = 0  # the number of the signal in the servers' replies, or 0
        self.training = 0  # Number of workers that may still send gradients. Each reply updates it.
        self.last_reply_s = 0.0  # when the last reply arrived, in seconds on the monotonic clock
        self._messages = messages
        self._specs = specs
        self._servers = [
            ServerHandle(rank, shard, memory.published.get(rank))
            for rank, shard in zip(servers, shards)
        ]
        self._shards = shards
        self._slots = memory.slots
        self._slot = 0  # the slot of the last gradient
        self._pool = BufferPool()
        # MPI moves large messages only inside its calls, so a thread waits for the reply to the
        # request in flight. No other thread calls MPI meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain push")
        self._in_flight: tuple[PendingRequest, Future[None]] | None = None
        self._abandoned: tuple[PendingRequest, Future[None]] | None = None
        self._unused: PendingRequest | None = None  # its weights were received but not returned yet
        self._closed = Event()

    def load(self, weights: Sequence[np.ndarray], states: Sequence[np.ndarray]) -> None:
        """Send the initial weights and flat optimizer states. Only the chief calls this."""
        data = []
        for shard, state in zip(self._shards, states):
            buffer = self._pool.take(shard.nbytes)
            shard.pack(weights, buffer)
            data.append([buffer, state])
        self._request(Kind.LOAD, data)

    def pull(self) -> list[np.ndarray]:
        """Return the newest weights. The first call waits until the chief has called ``load``."""
        return self._request(Kind.PULL)

    def push(
        self,
        gradients: Sequence[Gradient] | None,
        *,
        weight: float,
        learning_rate: float,
        position: tuple[int, ...] = NO_POSITION,
        overlap: bool = False,
    ) -> list[np.ndarray] | None:
        """Send gradients, and return the weights for the next step.

        If ``overlap`` is true, this method returns before the servers have replied. The worker
        computes its next gradient meanwhile, with the weights that the servers sent in reply to the
        previous gradient. Any other request first waits for the missing reply, and therefore
        returns newer weights.

        Args:
            gradients: Gradients of all variables, or None for a step without samples. They may be
                overwritten once this method returns.
            weight: The weight of the gradient when servers average gradients of several workers.
            learning_rate: The learning rate on the chief, and NaN on other workers.
            position: This worker's position in its data once the gradient is applied.
            overlap: Whether to return without waiting for the reply.

        Returns:
            The weights. If ``overlap`` is true and no reply was missing, the result is None,
            because the worker then already has the newest weights.

        Raises:
            MismatchError: If a server can't use the gradient or, with ``overlap``, the previous
                gradient.
            NonFiniteError: If the gradient, or the previous one, has NaN or infinity.
        """
        # Requests are built before the reply in flight changes the version, because the gradient
        # was computed with the older weights.
        requests = [
            Request(
                Kind.PUSH,
                step=server.step,
                version=server.version,
                has_gradient=gradients is not None,
                weight=weight,
                learning_rate=learning_rate,
                signal=self.own_signal,
                position=position,
            )
            for server in self._servers
        ]
        data = None
        if gradients is not None:
            # Prefer the first slot, which is in the cache, unless a server may still read it.
            self._slot = 0 if self._in_flight is None else (self._slot + 1) % GRADIENT_SLOTS
            data = [self._pack(server, gradients) for server in self._servers]
        pending = self._start(requests, data)
        if not overlap:
            return self._finish(pending)
        unused, self._unused = self._unused, None
        self._in_flight = pending, self._thread.submit(pending.wait, self._closed.is_set)
        return None if unused is None else self._use(unused)

    @property
    def has_newer_weights(self) -> bool:
        """Whether the servers have sent or will send weights that ``push`` has not returned yet."""
        return self._in_flight is not None or self._unused is not None

    def close(self) -> None:
        """Abandon a request whose replies have not arrived, for example after an error."""
        self._closed.set()
        self._thread.shutdown()
        # MPI may still write its reply into the buffers.
        self._abandoned, self._in_flight = self._in_flight, None

    def end(
        self, *, stop: bool = False, states: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Wait until all workers have called this, and return the final weights.

        If ``stop`` is true, the other workers stop, too. On the chief, ``states`` are buffers that
        receive each server's optimizer state.
        """
        return self._request(Kind.END, extra=[[state] for state in states or ()], stop=stop)

    def update_status(self) -> None:
        """Request ``signal``, ``training`` and ``stopped`` from the servers."""
        self._request(Kind.STATUS)

    def leave(self, *, stop: bool) -> None:
        """Announce that this worker will send no more gradients. ``end`` must still be called."""
        self._request(Kind.LEAVE, stop=stop)

    def averages(self, averages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the newest weights, and copy their moving averages to ``averages``.

        Only the chief calls this. As with ``pull``, the servers may be at different steps: one
        server may have applied gradients that another server has not applied yet.
        """
        return self._request(Kind.AVERAGES, extra=[[buffer] for buffer in averages])

    def snapshot(
        self, workers: int, states: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
        """Take a snapshot in which all servers have applied the same gradients.

        Only the chief calls this. The optimizers' state is copied to the buffers ``states``.

        Returns:
            Two values. The first are the weights. The second contains, for each worker, the
            position that the worker sent with its last gradient in the snapshot.
        """
        progress = [np.empty(workers, np.int64) for _ in self._servers]
        self._request(Kind.FREEZE, extra=[[entry] for entry in progress])
        target = np.max(progress, axis=0)
        positions = [np.empty((workers, POSITION_NUMBERS), np.int64) for _ in self._servers]
        weights = self._request(
            Kind.SNAPSHOT, [[target]] * len(self._servers), extra=list(zip(states, positions))
        )
        return weights, [tuple(row) for row in positions[0].tolist()]

    def _pack(self, server: ServerHandle, gradients: Sequence[Gradient]) -> list[np.ndarray]:
        if server.rank in self._slots:
            flat, slot = self._slots[server.rank][self._slot], self._slot
        else:
            flat, slot = self._pool.take(server.shard.nbytes), SENT
        packed = pack_gradients(server.shard, self._specs, gradients, flat, slot)
        return [packed.header, *packed.blocks()]

    def _request(
        self, kind: Kind, data: _Blocks | None = None, extra: _Blocks = (), stop: bool = False
    ) -> list[np.ndarray]:
        """Send the same request to all servers, and return the weights in the replies, if any."""
        requests = [Request(kind, stop=stop, signal=self.own_signal)] * len(self._servers)
        return self._finish(self._start(requests, data, extra))

    def _start(
        self, requests: Sequence[Request], data: _Blocks | None, extra: _Blocks = ()
    ) -> PendingRequest:
        """Wait for the replies to the previous request, if any are missing, then send requests."""
        if self._in_flight is not None:
            pending, waiting = self._in_flight
            waiting.result()
            self._in_flight = None
            self._check(pending)
            self._unused = pending
        self.pushed += requests[0].has_gradient
        buffers = [self._pool.take(shard.nbytes) for shard in self._shards]
        none = [()] * len(buffers)
        return PendingRequest(
            self._messages, self._servers, requests, buffers, data or none, extra or none
        )

    def _finish(self, pending: PendingRequest) -> list[np.ndarray]:
        pending.wait()
        self._check(pending)
        if not pending.has_weights:
            return []
        self._unused = None
        return self._use(pending)

    def _check(self, request: PendingRequest) -> None:
        """Update the status from the replies. Raise an error if a server refused the request."""
        self.last_reply_s = request.replied_s
        for reply in request.replies:
            self.stopped = self.stopped or reply.stop
            self.signal = self.signal or reply.signal
        self.training = max(reply.training for reply in request.replies)
        for server, reply in zip(self._servers, request.replies):
            if reply.refusal:
                self._take_versions(request)
                error = REFUSALS[reply.error]
                raise error(f"The parameter server, rank {server.rank}: {reply.refusal}")

    def _use(self, request: PendingRequest) -> list[np.ndarray]:
        """Return the weights that the servers sent, to compute the next gradient with."""
        self._take_versions(request)
        return assemble(self._specs, self._shards, request.buffers)

    def _take_versions(self, request: PendingRequest) -> None:
        for server, reply, version in zip(self._servers, request.replies, request.versions):
            server.step, server.version = reply.step, version
