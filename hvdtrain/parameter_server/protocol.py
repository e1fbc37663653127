"""The protocol of workers and parameter servers: requests and replies, and how they travel.

A worker sends a request to every server, with what belongs to it, and each server answers when it
may go on. All are a few numbers of fixed size; weights, gradients and optimizer states follow as
flat buffers, whose layout both sides know from the shards.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.point_to_point import PendingMessage, PointToPoint
from hvdtrain.errors import CollectiveError, MismatchError, NonFiniteError, PeerLostError
from hvdtrain.parameter_server.published_weights import PublishedWeights
from hvdtrain.parameter_server.sharding import Shard

__all__ = [
    "DATA",
    "NO_POSITION",
    "POSITION_NUMBERS",
    "REFUSALS",
    "REQUEST",
    "Kind",
    "PendingRequest",
    "Reply",
    "ReplySender",
    "Request",
    "ServerHandle",
]

# The tags of messages.
REQUEST = 1
DATA = 2
REPLY = 3
REPLY_DATA = 4

# What a request may be refused with.
REFUSALS: tuple[type[CollectiveError], ...] = (MismatchError, NonFiniteError)

# Answers with data that are on their way at a time: one that goes out, and the next.
MOST_UNTAKEN = 2

# Small enough to arrive without anybody waiting for it.
REFUSAL_BYTES = 800

POSITION_NUMBERS = 9
NO_POSITION = (-1,) * POSITION_NUMBERS

REQUEST_FORMAT = f"<qqq?dd?q{POSITION_NUMBERS}q"
REPLY_FORMAT = f"<qq?qqb{REFUSAL_BYTES}s"


class Kind(enum.IntEnum):
    """The kind of a request.

    The first request of a job is the chief's LOAD; servers let all others wait for it.
    """

    LOAD = 1  # the chief gives weights and the optimizer's state
    PULL = 2  # the weights
    PUSH = 3  # a gradient, for which the weights come back
    END = 4  # nothing more; answered when all are done, the chief with the optimizer's state, too
    LOOK = 5  # how things are; answered at once, without weights
    LEAVE = 6  # no gradient any more, but END comes later; answered as LOOK
    FREEZE = 7  # the chief wants a snapshot; answered with how far the server is
    SNAPSHOT = 8  # the chief says how far to go; weights, state and positions of that moment
    STATE = 9  # the chief wants weights and state as they are; answered at once


class Request(NamedTuple):
    """A worker's request to a server; what belongs to it comes after it.

    Attributes:
        kind: Which request it is.
        step: For a gradient, the number that the server gave with the weights.
        version: For a gradient, how many updates went into the weights it was computed with.
        has_gradient: Whether a gradient follows; there may be none in a step.
        weight: How much a gradient counts beside those of other workers.
        learning_rate: The chief's, where it has one to tell; NaN otherwise.
        stop: Whether a worker that is done wants the others to end as well.
        signal: One that came to this worker; the chief's is the one by which it ends all. 0 for
            none.
        position: Where the worker is in its data when this gradient is applied; numbers that
            servers keep for a snapshot. ``NO_POSITION`` leaves the last ones.
    """

    kind: Kind
    step: int = 0
    version: int = 0
    has_gradient: bool = False
    weight: float = 0.0
    learning_rate: float = float("nan")
    stop: bool = False
    signal: int = 0
    position: tuple[int, ...] = NO_POSITION

    def pack(self) -> np.ndarray:
        """Returns the request as bytes, as many as ``buffer`` has."""
        return _pack(REQUEST_FORMAT, *self[:-1], *self.position)

    @classmethod
    def unpack(cls, data: np.ndarray) -> Request:
        """Returns the request that ``pack`` made these bytes of."""
        kind, *values = struct.unpack(REQUEST_FORMAT, data.tobytes())
        single, position = values[:-POSITION_NUMBERS], tuple(values[-POSITION_NUMBERS:])
        return cls._make((Kind(kind), *single, position))

    @staticmethod
    def buffer() -> np.ndarray:
        """Returns room for the bytes of one."""
        return np.empty(struct.calcsize(REQUEST_FORMAT), np.uint8)


class Reply(NamedTuple):
    """A server's answer; the weights come after it.

    Attributes:
        step: The number of this worker's next step.
        version: How many updates went into the weights.
        stop: Whether training is to end.
        signal: To the chief, one that came to some rank; to the others, the one by which the chief
            has ended the training. 0 for none.
        training: How many workers may still send gradients.
        error: Which of ``REFUSALS`` a refusal is.
        refusal: What was wrong with the request; empty where nothing was. Otherwise the weights
            are not to be used.
    """

    step: int
    version: int
    stop: bool = False
    signal: int = 0
    training: int = 0
    error: int = 0
    refusal: str = ""

    def pack(self) -> np.ndarray:
        """Returns the reply as bytes, as many as ``buffer`` has."""
        return _pack(REPLY_FORMAT, *self[:-1], self.refusal.encode())

    @classmethod
    def unpack(cls, data: np.ndarray) -> Reply:
        """Returns the reply that ``pack`` made these bytes of."""
        *values, text = struct.unpack(REPLY_FORMAT, data.tobytes())
        # A text that was too long may end within a character.
        return cls._make((*values, text.rstrip(b"\0").decode(errors="replace")))

    @staticmethod
    def buffer() -> np.ndarray:
        """Returns room for the bytes of one."""
        return np.empty(struct.calcsize(REPLY_FORMAT), np.uint8)


# Which weights follow an answer: newest ones may be newer than it, these are not.
Weights = Literal["newest", "these", "none"]
_WEIGHTS: dict[Kind, Weights] = {
    Kind.LOOK: "none",
    Kind.LEAVE: "none",
    Kind.FREEZE: "none",
    Kind.SNAPSHOT: "these",
    Kind.STATE: "these",
}


@dataclass
class ServerHandle:
    """A server, as a worker knows it."""

    rank: int
    shard: Shard
    published: PublishedWeights | None
    """The memory that its weights are read from; None where it sends them."""
    step: int = 0
    """The number of this worker's next step there."""
    version: int = 0
    """The number of updates that went into the weights that this worker has."""


@dataclass(eq=False)
class PendingRequest:
    """Requests of one kind to all servers, which begin to travel at once, and their answers.

    All is received at once: a server does nothing else until its answer has been taken, so that
    whoever took one after another could wait for a server that waits for it.

    Attributes:
        messages: The way to the servers.
        servers: All of them; what follows has an entry for each.
        requests: What they are asked.
        buffers: Where their weights go.
        data: What follows the request; must stay as it is until ``wait`` returns.
        more: Where to put what follows the weights.
        replies: The answers, once they have come.
        versions: How many updates went into the weights in ``buffers``.
        heard_s: When the answers came, on the monotonic clock.
    """

    messages: PointToPoint
    servers: Sequence[ServerHandle]
    requests: Sequence[Request]
    buffers: Sequence[np.ndarray]
    data: Sequence[Sequence[np.ndarray]]
    more: Sequence[Sequence[np.ndarray]]
    replies: Sequence[Reply] = field(default=(), init=False)
    versions: Sequence[int] = field(default=(), init=False)
    heard_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._kind = self.requests[0].kind
        self.weights = _WEIGHTS.get(self._kind, "newest")
        newest = self.weights == "newest"
        self._published = [server.published if newest else None for server in self.servers]
        self._answers = [Reply.buffer() for _ in self.servers]
        # What is sent must live until it has been.
        self._packed = [request.pack() for request in self.requests]
        self._pending: list[PendingMessage] = []
        receive, send = self.messages.start_receive, self.messages.start_send
        for number, server in enumerate(self.servers):
            self._pending += receive(self._answers[number], server.rank, REPLY)
            sends_weights = self.weights != "none" and self._published[number] is None
            weights = [self.buffers[number]] if sends_weights else []
            for buffer in (*weights, *self.more[number]):
                self._pending += receive(buffer, server.rank, REPLY_DATA)
            self._pending += send(self._packed[number], server.rank, REQUEST)
            for block in self.data[number]:
                self._pending += send(block, server.rank, DATA)

    def wait(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Return when all answers have come, and weights that are read have been.

        ``unless``, and what is raised, are those of ``PointToPoint.wait``.
        """
        what = f"{self._kind.name.lower()}, for the parameter servers"
        # Who has ended waits as long as others train.
        endless = self._kind is Kind.END
        self.messages.wait(self._pending, what, endless=endless, unless=unless)
        if unless():
            return
        # What was sent may be used again.
        self._pending, self.data = [], ()
        self.heard_s = time.monotonic()
        self.replies = [Reply.unpack(answer) for answer in self._answers]
        self.versions = versions = [reply.version for reply in self.replies]
        if any(reply.refusal for reply in self.replies):
            return
        for number, published in enumerate(self._published):
            if published is not None:
                # They are of the reply's version, or newer.
                versions[number] = published.read(self.buffers[number])


class ReplySender:
    """Sends each worker one answer after another.

    What comes with an answer is copied, and on its way while the server receives the next
    gradient: so both directions of its link are busy. A worker that has died gets none, which is no
    error: who is lost is seen elsewhere, for all of them together.
    """

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages
        # By worker, the oldest first; MPI reads what is sent until it is taken.
        self._untaken: dict[int, tuple[Sequence[np.ndarray], Sequence[PendingMessage]]] = {}
        self._pool = BufferPool(max_idle=MOST_UNTAKEN)

    def send(self, worker: int, reply: Reply, data: Sequence[np.ndarray]) -> None:
        """Send an answer, and what comes with it; return without waiting until that is taken.

        Only of ``MOST_UNTAKEN`` with data the oldest is waited for, as each is a copy.
        """
        # Taken long ago, but MPI keeps what belongs to a message until somebody has asked.
        self._await_taken(worker)
        if data:
            with_data = [other for other, (parts, _) in self._untaken.items() if len(parts) > 1]
            for other in with_data[: 1 - MOST_UNTAKEN]:
                self._await_taken(other)
        parts = [reply.pack(), *map(self._copy, data)]
        with contextlib.suppress(PeerLostError):
            pending = self._messages.start_send(parts[0], worker, REPLY)
            for part in parts[1:]:
                pending += self._messages.start_send(part, worker, REPLY_DATA)
            self._untaken[worker] = parts, pending

    def finish(self) -> None:
        """Return when every answer is taken."""
        for worker in tuple(self._untaken):
            self._await_taken(worker)

    def _copy(self, part: np.ndarray) -> np.ndarray:
        buffer = self._pool.take(part.nbytes)
        np.copyto(buffer, part.reshape(-1).view(np.uint8))
        return buffer

    def _await_taken(self, worker: int) -> None:
        _, pending = self._untaken.pop(worker, ((), ()))
        with contextlib.suppress(PeerLostError):
            self._messages.wait(pending, f"parameter server, for rank {worker} to take its answer")


def _pack(form: str, *values: object) -> np.ndarray:
    return np.frombuffer(struct.pack(form, *values), np.uint8)
