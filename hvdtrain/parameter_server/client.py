"""A worker's side: sends gradients to all servers, and takes the weights that come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np

from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.parameter_server.gradient_packing import SENT, Gradient, pack_gradients
from hvdtrain.parameter_server.pending_request import PendingRequest, ServerHandle, Wanted
from hvdtrain.parameter_server.protocol import (
    NO_STAND,
    REFUSALS,
    STAND_NUMBERS,
    Kind,
    Request,
)
from hvdtrain.parameter_server.sharding import Shard, Spec, numpy_dtype
from hvdtrain.parameter_server.shared_gradients import SLOTS, Slots
from hvdtrain.parameter_server.shared_weights import PublishedWeights

__all__ = ["Client"]


class Client:
    """One worker's way to the servers of one ``fit``.

    Weights come as arrays of all trainable variables. They stay as they are as long as somebody
    holds one of them.

    Args:
        messages: To the servers.
        specs: Of all trainable variables.
        servers: By rank.
        shards: What each of them holds.
        published: By rank the weights of those servers that let this worker read them.
        slots: By rank where those servers that see it find dense gradients.
    """

    def __init__(
        self,
        messages: PointToPoint,
        specs: Sequence[Spec],
        servers: Sequence[int],
        shards: Sequence[Shard],
        published: Mapping[int, PublishedWeights],
        slots: Mapping[int, Slots],
    ) -> None:
        self._messages = messages
        self._specs = specs
        self._servers = [
            ServerHandle(rank, shard, published.get(rank)) for rank, shard in zip(servers, shards)
        ]
        self._slots = slots
        self._slot = 0  # of the last gradient
        self._pool = BufferPool()
        # MPI moves large messages only while it is called, and training calls other things. So a
        # thread waits for the answer to what is under way; no other call of MPI is made meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain push")
        self._under_way: tuple[PendingRequest, Future[None]] | None = None
        self._came: PendingRequest | None = None  # of it, with weights that are not used yet
        self._closed = Event()
        self.pushed = 0
        """How many gradients went to the servers."""
        self.stopped = False
        """Whether another worker has ended the training."""
        self.learning_rate = math.nan
        """What the servers use next; NaN where they don't tell."""
        self.own_signal = 0
        """A signal that came to this worker, to be told with each request; see ``Request``."""
        self.signal = 0
        """What the servers know of signals; see ``Reply``."""
        self.training = 0
        """How many workers may still send gradients; known after any answer."""
        self.heard_s = 0.0
        """When the last answer came, on the monotonic clock."""

    def load(self, weights: Sequence[np.ndarray], states: Sequence[np.ndarray]) -> None:
        """Give the servers what training begins with; the chief does.

        Args:
            weights: Of all variables.
            states: Of the optimizer, a flat buffer for each server.
        """
        data = []
        for server, state in zip(self._servers, states):
            buffer = self._pool.take(server.shard.nbytes)
            server.shard.pack(weights, buffer)
            data.append([buffer, state])
        self._ask(self._to_all(Kind.LOAD), "load", data)

    def pull(self) -> list[np.ndarray]:
        """The newest weights; the first time when the chief has loaded some."""
        return self._ask(self._to_all(Kind.PULL), "pull")

    def push(
        self,
        gradients: Sequence[Gradient] | None,
        *,
        weight: float,
        learning_rate: float,
        stand: tuple[int, ...] = NO_STAND,
    ) -> list[np.ndarray]:
        """Give a gradient to the servers, and take the weights for the next step.

        Args:
            gradients: Of all variables; None where this step has none that counts.
            weight: What the gradient counts for, where it is averaged with those of others.
            learning_rate: The optimizer's, as the chief has it; NaN elsewhere.
            stand: Where this worker is in its data, once the gradient is applied.

        Raises:
            MismatchError: A server can't use it.
            NonFiniteError: It holds NaN or infinity, which a server doesn't take.
        """
        requests, data = self._words_of(gradients, weight, learning_rate, stand)
        return self._ask(requests, "push", data)

    def push_ahead(
        self,
        gradients: Sequence[Gradient] | None,
        *,
        weight: float,
        learning_rate: float,
        stand: tuple[int, ...] = NO_STAND,
    ) -> list[np.ndarray] | None:
        """Give a gradient to the servers, and take the weights that came for the one before.

        The worker computes its next gradient while this one is under way. Whatever else is asked
        of the servers waits for the answer, and brings newer weights.

        Args:
            gradients: As for ``push``, and so are the others; free for other use afterwards.
            weight: What the gradient counts for.
            learning_rate: The optimizer's.
            stand: Where this worker is in its data.

        Returns:
            Weights; None if no gradient was under way: those that the worker has are the newest.

        Raises:
            MismatchError: A server couldn't use the gradient before.
            NonFiniteError: That held NaN or infinity.
        """
        # Of the weights that it was computed with, older than those that come now.
        requests, data = self._words_of(gradients, weight, learning_rate, stand)
        self._settle()
        came, self._came = self._came, None
        asked = self._start(requests, "push", data)
        self._under_way = asked, self._thread.submit(asked.wait, self._closed.is_set)
        return None if came is None else self._use(came)

    @property
    def is_ahead(self) -> bool:
        """Whether there are weights to come, or to be used, for what was pushed ahead."""
        return self._under_way is not None or self._came is not None

    def close(self) -> None:
        """Push nothing ahead any more; give up what is under way, as after an error."""
        self._closed.set()
        self._thread.shutdown()
        self._under_way = None

    def done(
        self, *, stop: bool = False, states: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Say that no gradient will come any more, and wait for all other workers to say so.

        Args:
            stop: Whether the others are to end as well.
            states: For the chief, filled with the optimizer's state on each server.

        Returns:
            The last weights.
        """
        more = None if states is None else [[state] for state in states]
        return self._ask(self._to_all(Kind.DONE, stop=stop), "end", more=more, endless=True)

    def look(self) -> None:
        """See how things are: ``signal``, ``training``, ``stopped``."""
        self._ask(self._to_all(Kind.LOOK), "look", wanted="none")

    def leave(self, *, stop: bool = False) -> None:
        """Say that no gradient will come any more, and go on; ``done`` must come later.

        Args:
            stop: Whether the others are to end as well.
        """
        self._ask(self._to_all(Kind.LEAVE, stop=stop), "leave", wanted="none")

    def state(self, states: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The newest weights, and what each server's optimizer knows with them; for the chief.

        Servers may be at different moments, as they may with ``pull``.

        Args:
            states: Filled with the optimizer's state on each server.
        """
        more = [[state] for state in states]
        return self._ask(self._to_all(Kind.STATE), "state", more=more, wanted="these")

    def snapshot(
        self, workers: int, states: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
        """What all servers hold at one moment, with the same gradients in it; for the chief.

        Args:
            workers: How many there are.
            states: Filled with the optimizer's state on each server.

        Returns:
            The weights, and the stand that came with the last gradient of each worker in them.
        """
        far = [np.empty(workers, np.int64) for _ in self._servers]
        self._ask(
            self._to_all(Kind.FREEZE), "freeze", more=[[entry] for entry in far], wanted="none"
        )
        furthest = np.max(far, axis=0)
        stands = [np.empty((workers, STAND_NUMBERS), np.int64) for _ in self._servers]
        weights = self._ask(
            self._to_all(Kind.SNAPSHOT),
            "snapshot",
            [[furthest]] * len(self._servers),
            more=list(zip(states, stands)),
            wanted="these",
        )
        return weights, [tuple(row) for row in stands[0].tolist()]

    def _words_of(
        self,
        gradients: Sequence[Gradient] | None,
        weight: float,
        learning_rate: float,
        stand: tuple[int, ...],
    ) -> tuple[list[Request], list[list[np.ndarray]] | None]:
        """A push, and what follows it."""
        requests = [
            Request(
                Kind.PUSH,
                step=server.step,
                version=server.version,
                counts=gradients is not None,
                weight=weight,
                learning_rate=learning_rate,
                signal=self.own_signal,
                stand=stand,
            )
            for server in self._servers
        ]
        if gradients is None:
            return requests, None
        # The first slot unless a server may still read it: what caches hold of it is of use.
        self._slot = 0 if self._under_way is None else (self._slot + 1) % SLOTS
        return requests, [self._pack(server, gradients) for server in self._servers]

    def _pack(self, server: ServerHandle, gradients: Sequence[Gradient]) -> list[np.ndarray]:
        if server.rank in self._slots:
            flat, slot = self._slots[server.rank][self._slot], self._slot
        else:
            flat, slot = self._pool.take(server.shard.nbytes), SENT
        parts = pack_gradients(server.shard, self._specs, gradients, flat, slot)
        return [parts.words, *parts.blocks()]

    def _to_all(self, kind: Kind, *, stop: bool = False) -> list[Request]:
        return [Request(kind, stop=stop, signal=self.own_signal)] * len(self._servers)

    def _ask(
        self,
        requests: Sequence[Request],
        what: str,
        data: Sequence[Sequence[np.ndarray]] | None = None,
        *,
        more: Sequence[Sequence[np.ndarray]] | None = None,
        wanted: Wanted = "newest",
        endless: bool = False,
    ) -> list[np.ndarray]:
        """Send requests, each with its data, and take the answers; as for ``PendingRequest``.

        Returns:
            Weights, unless none are wanted.
        """
        self._settle()
        asked = self._start(requests, what, data, more=more, wanted=wanted, endless=endless)
        asked.wait()
        self._note(asked)
        if wanted == "none":
            return []
        self._came = None
        return self._use(asked)

    def _start(
        self,
        requests: Sequence[Request],
        what: str,
        data: Sequence[Sequence[np.ndarray]] | None,
        *,
        more: Sequence[Sequence[np.ndarray]] | None = None,
        wanted: Wanted = "newest",
        endless: bool = False,
    ) -> PendingRequest:
        self.pushed += sum(request.counts for request in requests[:1])
        return PendingRequest(
            self._messages,
            self._servers,
            requests,
            what,
            data=data,
            buffers=[self._pool.take(server.shard.nbytes) for server in self._servers],
            wanted=wanted,
            more=more,
            endless=endless,
        )

    def _settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            MismatchError: A server couldn't use what was.
            NonFiniteError: It held NaN or infinity.
        """
        if self._under_way is None:
            return
        asked, waiting = self._under_way
        waiting.result()
        self._under_way = None
        self._note(asked)
        self._came = asked

    def _note(self, asked: PendingRequest) -> None:
        """Take over what the servers said, beside the weights.

        Raises:
            CollectiveError: They refused; one of ``REFUSALS``.
        """
        self.heard_s = asked.heard_s
        for reply in asked.replies:
            self.stopped = self.stopped or reply.stop
            self.signal = self.signal or reply.signal
        self.training = max(reply.training for reply in asked.replies)
        self.learning_rate = asked.replies[0].learning_rate
        for server, reply in zip(self._servers, asked.replies):
            if reply.refusal:
                self._follow(asked)
                error = REFUSALS[reply.error]
                raise error(f"The parameter server, rank {server.rank}: {reply.refusal}")

    def _use(self, asked: PendingRequest) -> list[np.ndarray]:
        """The weights that came, for the next gradient."""
        self._follow(asked)
        return self._assemble(asked.buffers)

    def _follow(self, asked: PendingRequest) -> None:
        for server, reply, version in zip(self._servers, asked.replies, asked.versions):
            server.step, server.version = reply.step, version

    def _assemble(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All variables; without a copy where one server has the whole."""
        weights: dict[int, np.ndarray] = {}
        for server, buffer in zip(self._servers, buffers):
            for piece, view in zip(server.shard.pieces, server.shard.views(buffer)):
                spec = self._specs[piece.variable]
                if view.size == spec.size:
                    weights[piece.variable] = view
                    continue
                if piece.variable not in weights:
                    weights[piece.variable] = np.empty(spec.shape, view.dtype)
                flat = weights[piece.variable].reshape(-1)
                flat[piece.start : piece.stop] = view.reshape(-1)
        # Variables without elements are on no server.
        return [
            weights[number] if number in weights else np.empty(spec.shape, numpy_dtype(spec.dtype))
            for number, spec in enumerate(self._specs)
        ]
