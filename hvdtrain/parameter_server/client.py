"""A worker's side: sends gradients to all servers, and takes the weights that come back."""

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
    """One worker's way to the servers of one ``fit``.

    Weights come as arrays of all trainable variables. They stay as they are as long as somebody
    holds one of them.
    """

    def __init__(
        self,
        messages: PointToPoint,
        specs: Sequence[Spec],
        servers: Sequence[int],
        shards: Sequence[Shard],
        memory: SharedMemory,
    ) -> None:
        self._messages = messages
        self._specs = specs
        self._servers = [
            ServerHandle(rank, shard, memory.published.get(rank))
            for rank, shard in zip(servers, shards)
        ]
        self._shards = shards
        self._slots = memory.slots
        self._slot = 0  # of the last gradient
        self._pool = BufferPool()
        # MPI moves large messages only while it is called, and training calls other things. So a
        # thread waits for the answer to what is under way; no other call of MPI is made meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain push")
        self._under_way: tuple[PendingRequest, Future[None]] | None = None
        self._given_up: tuple[PendingRequest, Future[None]] | None = None
        self._came: PendingRequest | None = None  # of it, with weights that are not used yet
        self._closed = Event()
        self.pushed = 0
        """The number of gradients that went to the servers."""
        self.stopped = False
        """Whether another worker has ended the training."""
        self.own_signal = 0
        """A signal that came to this worker, to be told with each request; see ``Request``."""
        self.signal = 0
        """The signal that the servers told of, 0 for none; see ``Reply``."""
        self.training = 0
        """The number of workers that may still send gradients; known after any answer."""
        self.heard_s = 0.0
        """The time at which the last answer came, on the monotonic clock."""

    def load(self, weights: Sequence[np.ndarray], states: Sequence[np.ndarray]) -> None:
        """Give the servers all weights, and each its optimizer's flat state; the chief does."""
        data = []
        for shard, state in zip(self._shards, states):
            buffer = self._pool.take(shard.nbytes)
            shard.pack(weights, buffer)
            data.append([buffer, state])
        self._ask(Kind.LOAD, data)

    def pull(self) -> list[np.ndarray]:
        """Returns the newest weights; the first time when the chief has loaded some."""
        return self._ask(Kind.PULL)

    def push(
        self,
        gradients: Sequence[Gradient] | None,
        *,
        weight: float,
        learning_rate: float,
        position: tuple[int, ...] = NO_POSITION,
        ahead: bool = False,
    ) -> list[np.ndarray] | None:
        """Give a gradient to the servers, and take the weights for the next step.

        A worker that pushes ahead computes its next gradient while this one is under way, with the
        weights that came for the one before. Whatever else is asked of the servers waits for the
        answer, and brings newer weights.

        Args:
            gradients: One for each variable; None where this step has none that counts. They are
                free for other use afterwards.
            weight: How much the gradient counts where it is averaged with those of others.
            learning_rate: The optimizer's, as the chief has it; NaN elsewhere.
            position: Where this worker is in its data, once the gradient is applied.
            ahead: Leave this gradient under way.

        Returns:
            Weights; None if ``ahead`` and no gradient was under way: those that the worker has are
            the newest.

        Raises:
            MismatchError: A server can't use it or, if ``ahead``, the one before.
            NonFiniteError: It, or the one before, holds NaN or infinity.
        """
        # With the version of the weights that it was computed with, older than those that come now.
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
            # The first slot unless a server may still read it: what caches hold of it is of use.
            self._slot = 0 if self._under_way is None else (self._slot + 1) % GRADIENT_SLOTS
            data = [self._pack(server, gradients) for server in self._servers]
        pending = self._start(requests, data)
        if not ahead:
            return self._take(pending)
        came, self._came = self._came, None
        self._under_way = pending, self._thread.submit(pending.wait, self._closed.is_set)
        return None if came is None else self._use(came)

    @property
    def is_ahead(self) -> bool:
        """Whether there are weights to come, or to be used, for what was pushed ahead."""
        return self._under_way is not None or self._came is not None

    def close(self) -> None:
        """Push nothing ahead any more; give up what is under way, as after an error."""
        self._closed.set()
        self._thread.shutdown()
        # Its answer may still come, into its buffers.
        self._given_up, self._under_way = self._under_way, None

    def end(
        self, *, stop: bool = False, states: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Say that no gradient will come any more, and wait for all other workers to say so.

        ``stop`` ends the others as well; for the chief ``states`` is filled with each server's
        optimizer's. Returns the last weights.
        """
        return self._ask(Kind.END, more=[[state] for state in states or ()], stop=stop)

    def look(self) -> None:
        """Ask the servers how things are: ``signal``, ``training``, ``stopped``."""
        self._ask(Kind.LOOK)

    def leave(self, *, stop: bool = False) -> None:
        """Say that no gradient will come any more, as ``end`` does, which must come later."""
        self._ask(Kind.LEAVE, stop=stop)

    def state(self, states: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the newest weights, for the chief, and fills ``states`` with each optimizer's.

        Servers may be at different moments, as they may with ``pull``.
        """
        return self._ask(Kind.STATE, more=[[state] for state in states])

    def snapshot(
        self, workers: int, states: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
        """Take what all servers hold at one moment, with the same gradients in it; the chief does.

        Returns:
            The weights, and the position that came with the last gradient of each worker in them;
            ``states`` is filled with the optimizer's state on each server.
        """
        progress = [np.empty(workers, np.int64) for _ in self._servers]
        self._ask(Kind.FREEZE, more=[[entry] for entry in progress])
        furthest = np.max(progress, axis=0)
        positions = [np.empty((workers, POSITION_NUMBERS), np.int64) for _ in self._servers]
        weights = self._ask(
            Kind.SNAPSHOT, [[furthest]] * len(self._servers), more=list(zip(states, positions))
        )
        return weights, [tuple(row) for row in positions[0].tolist()]

    def _pack(self, server: ServerHandle, gradients: Sequence[Gradient]) -> list[np.ndarray]:
        if server.rank in self._slots:
            flat, slot = self._slots[server.rank][self._slot], self._slot
        else:
            flat, slot = self._pool.take(server.shard.nbytes), SENT
        packed = pack_gradients(server.shard, self._specs, gradients, flat, slot)
        return [packed.header, *packed.blocks()]

    def _ask(
        self,
        kind: Kind,
        data: _Blocks | None = None,
        *,
        more: _Blocks | None = None,
        stop: bool = False,
    ) -> list[np.ndarray]:
        """Ask the same of all servers, as ``_start`` does; returns weights where some come."""
        requests = [Request(kind, stop=stop, signal=self.own_signal)] * len(self._servers)
        return self._take(self._start(requests, data, more))

    def _start(
        self, requests: Sequence[Request], data: _Blocks | None, more: _Blocks | None = None
    ) -> PendingRequest:
        """Send requests, each with its data, once nothing else is under way.

        ``more`` is filled with what follows the answers.
        """
        self._settle()
        self.pushed += requests[0].has_gradient
        buffers = [self._pool.take(shard.nbytes) for shard in self._shards]
        none = [()] * len(buffers)
        return PendingRequest(
            self._messages, self._servers, requests, buffers, data or none, more or none
        )

    def _take(self, pending: PendingRequest) -> list[np.ndarray]:
        """Wait for the answers; returns the weights that came with them, if any were to come."""
        pending.wait()
        self._note(pending)
        if pending.weights == "none":
            return []
        self._came = None
        return self._use(pending)

    def _settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            CollectiveError: The servers refused what was; one of ``REFUSALS``.
        """
        if self._under_way is None:
            return
        pending, waiting = self._under_way
        waiting.result()
        self._under_way = None
        self._note(pending)
        self._came = pending

    def _note(self, answered: PendingRequest) -> None:
        """Take over what the servers said, beside the weights.

        Raises:
            CollectiveError: They refused; one of ``REFUSALS``.
        """
        self.heard_s = answered.heard_s
        for reply in answered.replies:
            self.stopped = self.stopped or reply.stop
            self.signal = self.signal or reply.signal
        self.training = max(reply.training for reply in answered.replies)
        for server, reply in zip(self._servers, answered.replies):
            if reply.refusal:
                self._follow(answered)
                error = REFUSALS[reply.error]
                raise error(f"The parameter server, rank {server.rank}: {reply.refusal}")

    def _use(self, answered: PendingRequest) -> list[np.ndarray]:
        """Returns the weights that came, for the next gradient."""
        self._follow(answered)
        return assemble(self._specs, self._shards, answered.buffers)

    def _follow(self, answered: PendingRequest) -> None:
        for server, reply, version in zip(self._servers, answered.replies, answered.versions):
            server.step, server.version = reply.step, version
