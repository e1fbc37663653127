"""A worker's side: sends gradients to all servers, and takes the weights that come back."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hvdtrain.collectives.layout import BufferPool
from hvdtrain.collectives.messages import Messages
from hvdtrain.parameter_server.gradients import SENT, Gradient, pack_gradients
from hvdtrain.parameter_server.handing import SLOTS, Slots
from hvdtrain.parameter_server.protocol import (
    DATA,
    NO_STAND,
    REFUSALS,
    REPLY,
    REPLY_DATA,
    REQUEST,
    STAND_NUMBERS,
    Kind,
    Reply,
    Request,
)
from hvdtrain.parameter_server.published import Published
from hvdtrain.parameter_server.shards import Shard, Spec, numpy_dtype

__all__ = ["Client"]


@dataclass
class _Server:
    """What a worker knows of a server: where it is, its shard, and what it said last."""

    rank: int
    shard: Shard
    published: Published | None  # where its weights are read; None where it sends them
    step: int = 0
    version: int = 0


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
        messages: Messages,
        specs: Sequence[Spec],
        servers: Sequence[int],
        shards: Sequence[Shard],
        published: Mapping[int, Published],
        slots: Mapping[int, Slots],
    ) -> None:
        self._messages = messages
        self._specs = specs
        self._servers = [
            _Server(rank, shard, published.get(rank)) for rank, shard in zip(servers, shards)
        ]
        self._slots = slots
        self._filled: int | None = None  # the slot of a gradient that is under way
        self._pool = BufferPool()
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
        data = None
        if gradients is not None:
            # The first one unless a server may still read it: what the caches hold of it is of use.
            self._filled = 0 if self._filled is None else (self._filled + 1) % SLOTS
            data = [self._pack(server, gradients) for server in self._servers]
            self.pushed += 1
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
        weights = self._ask(requests, "push", data)
        self._filled = None
        return weights

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
        self._ask(self._to_all(Kind.LOOK), "look", weights="none")

    def leave(self, *, stop: bool = False) -> None:
        """Say that no gradient will come any more, and go on; ``done`` must come later.

        Args:
            stop: Whether the others are to end as well.
        """
        self._ask(self._to_all(Kind.LEAVE, stop=stop), "leave", weights="none")

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
            self._to_all(Kind.FREEZE), "freeze", more=[[entry] for entry in far], weights="none"
        )
        furthest = np.max(far, axis=0)
        stands = [np.empty((workers, STAND_NUMBERS), np.int64) for _ in self._servers]
        weights = self._ask(
            self._to_all(Kind.SNAPSHOT),
            "snapshot",
            [[furthest]] * len(self._servers),
            more=list(zip(states, stands)),
            weights="this",
        )
        return weights, [tuple(row) for row in stands[0].tolist()]

    def _pack(self, server: _Server, gradients: Sequence[Gradient]) -> list[np.ndarray]:
        if server.rank in self._slots and self._filled is not None:
            flat, slot = self._slots[server.rank][self._filled], self._filled
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
        weights: Literal["newest", "this", "none"] = "newest",
        endless: bool = False,
    ) -> list[np.ndarray]:
        """Send requests, each with its data, and take the answers: weights, and perhaps more.

        Args:
            requests: One for each server.
            what: Names them for whoever asks what this rank waits for.
            data: For each server, what follows the request.
            more: For each server, where to put what follows the weights.
            weights: Whether these are answered; with "newest" they may be newer than the answer,
                with "this" they are not. With "none" nothing is returned.
            endless: As for ``Messages.wait``.

        All is received at once: a server does nothing else until its answer has been taken, so
        that whoever took one after another could wait for a server that waits for it.
        """
        messages = self._messages
        pending = []
        answers = [Reply.buffer() for _ in self._servers]
        buffers = [self._pool.take(server.shard.nbytes) for server in self._servers]
        kept = []  # what is sent must live until it has been
        for number, (server, request) in enumerate(zip(self._servers, requests)):
            pending += messages.start_receive(answers[number], server.rank, REPLY)
            reads = server.published is not None and weights == "newest"
            parts = [buffers[number]] if weights != "none" and not reads else []
            for buffer in (*parts, *(more[number] if more is not None else ())):
                pending += messages.start_receive(buffer, server.rank, REPLY_DATA)
            words = request.pack()
            kept.append(words)
            pending += messages.start_send(words, server.rank, REQUEST)
            for block in data[number] if data is not None else ():
                pending += messages.start_send(block, server.rank, DATA)
        messages.wait(pending, f"{what}, for the parameter servers", endless=endless)
        self.heard_s = time.monotonic()
        replies = [Reply.unpack(answer) for answer in answers]
        for server, reply in zip(self._servers, replies):
            if weights != "none":
                server.step, server.version = reply.step, reply.version
            self.stopped = self.stopped or reply.stop
            self.signal = self.signal or reply.signal
        self.training = max(reply.training for reply in replies)
        self.learning_rate = replies[0].learning_rate
        for server, reply in zip(self._servers, replies):
            if reply.refusal:
                error = REFUSALS[reply.error]
                raise error(f"The parameter server, rank {server.rank}: {reply.refusal}")
        if weights == "none":
            return []
        for server, buffer in zip(self._servers, buffers):
            if server.published is not None and weights == "newest":
                # Of the reply's version, or newer.
                server.version = server.published.read(buffer)
        return self._assemble(buffers)

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
