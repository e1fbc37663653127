"""The wire protocol between workers and parameter servers.

A worker sends each request to all servers, and a server replies as soon as the worker may proceed.
Requests and replies have a fixed size. Weights, gradients and optimizer states follow them as flat
buffers, whose layout both sides know from the shards.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

# Message tags.
REQUEST = 1
DATA = 2
REPLY = 3
REPLY_DATA = 4

# The errors with which a server may refuse a request. A reply holds the index of the error.
REFUSALS: tuple[type[CollectiveError], ...] = (MismatchError, NonFiniteError)
# Small enough for MPI to send the message eagerly, so that neither side waits for the other.
REFUSAL_BYTES = 800

# Number of replies with data in flight at a time: one that is being sent, and the next one.
MAX_IN_FLIGHT = 2

POSITION_NUMBERS = 9
NO_POSITION = (-1,) * POSITION_NUMBERS

_REQUEST = struct.Struct(f"<qqq?dd?q{POSITION_NUMBERS}q")
_REPLY = struct.Struct(f"<qq?qqb{REFUSAL_BYTES}s")


class Kind(enum.IntEnum):
    """The kind of a request.

    The chief's first request is LOAD. Until it has arrived, servers send no weights to workers.
    """

    LOAD = 1  # the chief sends weights and optimizer state
    PULL = 2  # get the weights
    PUSH = 3  # send a gradient and get the weights
    END = 4  # the last request; the reply comes when all workers are done, with state for the chief
    STATUS = 5  # get the status at once, without weights
    LEAVE = 6  # the worker sends no more gradients, only END later; same reply as STATUS
    FREEZE = 7  # the chief starts a snapshot and gets the server's progress
    SNAPSHOT = 8  # the chief sends the target progress and gets weights, state and positions
    AVERAGES = 9  # the chief gets the current weights and their moving averages at once


class Request(NamedTuple):
    """A worker's request to a server."""

    kind: Kind
    step: int = 0  # for a gradient, the step number from the server's last reply
    # for a gradient, the version of the weights with which the gradient was computed
    version: int = 0
    has_gradient: bool = False
    weight: float = 0.0  # the weight of the gradient relative to other workers' gradients
    # The chief's learning rate. NaN leaves the server's learning rate unchanged.
    learning_rate: float = float("nan")
    stop: bool = False  # whether this worker stops the training of all workers
    # The number of a signal that this worker received, or 0. A signal from the chief ends the
    # training.
    signal: int = 0
    # The worker's position in its data after this gradient. Servers store it for snapshots.
    # ``NO_POSITION`` leaves the stored position unchanged.
    position: tuple[int, ...] = NO_POSITION

    def pack(self) -> np.ndarray:
        """Return the request as bytes."""
        return np.frombuffer(_REQUEST.pack(*self[:-1], *self.position), np.uint8)

    @classmethod
    def unpack(cls, data: np.ndarray) -> Request:
        """Create a request from the bytes that ``pack`` returned."""
        kind, *values = _REQUEST.unpack(data.tobytes())
        fields, position = values[:-POSITION_NUMBERS], tuple(values[-POSITION_NUMBERS:])
        return cls._make((Kind(kind), *fields, position))

    @staticmethod
    def buffer() -> np.ndarray:
        """Return an empty receive buffer."""
        return np.empty(_REQUEST.size, np.uint8)


class Reply(NamedTuple):
    """A server's reply."""

    step: int  # the number of the next step of the worker
    # the version of the weights, which is the number of updates that were applied to them
    version: int
    stop: bool = False  # whether the worker must stop training
    # In a reply to the chief, the number of a signal that some rank received. In a reply to another
    # worker, the signal with which the chief ended the training. 0 if there is no signal.
    signal: int = 0
    training: int = 0  # how many workers may still send gradients
    error: int = 0  # the index in ``REFUSALS`` of the error with which the request was refused
    # Why the request was refused, or "" if it was not. The weights in the reply to a refused
    # request are undefined.
    refusal: str = ""

    def pack(self) -> np.ndarray:
        """Return the reply as bytes."""
        return np.frombuffer(_REPLY.pack(*self[:-1], self.refusal.encode()), np.uint8)

    @classmethod
    def unpack(cls, data: np.ndarray) -> Reply:
        """Create a reply from the bytes that ``pack`` returned."""
        *values, text = _REPLY.unpack(data.tobytes())
        # A text that was too long may end within a character.
        return cls._make((*values, text.rstrip(b"\0").decode(errors="replace")))

    @staticmethod
    def buffer() -> np.ndarray:
        """Return an empty receive buffer."""
        return np.empty(_REPLY.size, np.uint8)


_WITHOUT_WEIGHTS = (Kind.STATUS, Kind.LEAVE, Kind.FREEZE)
# The weights of these kinds are always sent, because those in shared memory may be newer than the
# reply.
_EXACT_WEIGHTS = (Kind.SNAPSHOT, Kind.AVERAGES)


@dataclass
class ServerHandle:
    """A worker's view of a server."""

    rank: int
    shard: Shard
    published: PublishedWeights | None  # None if the server sends its weights
    step: int = 0  # the number of this worker's next step
    version: int = 0  # of the weights that this worker has


class PendingRequest:
    """A request that was sent to all servers, and whose replies are being received.

    All replies are received concurrently. A server may block until a worker has received its reply,
    so two workers that received one reply after another could deadlock.

    Args:
        servers: All servers. The other sequences have an entry for each server.
        buffers: Buffers that receive the weights.
        data: Arrays to send after the request. They must not change until ``wait`` returns.
        extra: Arrays that receive the data that follows the weights in the replies.
    """

    def __init__(
        self,
        messages: PointToPoint,
        servers: Sequence[ServerHandle],
        requests: Sequence[Request],
        buffers: Sequence[np.ndarray],
        data: Sequence[Sequence[np.ndarray]],
        extra: Sequence[Sequence[np.ndarray]],
    ) -> None:
        self.buffers = buffers
        self.replies: Sequence[Reply] = ()
        self.versions: Sequence[int] = ()  # of the weights in ``buffers``
        self.replied_s = 0.0  # monotonic clock
        self._messages = messages
        self._kind = requests[0].kind
        self.has_weights = self._kind not in _WITHOUT_WEIGHTS
        reads = self.has_weights and self._kind not in _EXACT_WEIGHTS
        self._published = [server.published if reads else None for server in servers]
        self._replies = [Reply.buffer() for _ in servers]
        self._pending: list[PendingMessage] = []
        # MPI reads and writes these until the messages are complete.
        self._in_use = packed, data, extra = [request.pack() for request in requests], data, extra
        receive, send = messages.start_receive, messages.start_send
        for number, server in enumerate(servers):
            self._pending += receive(self._replies[number], server.rank, REPLY)
            sent = self.has_weights and self._published[number] is None
            weights = [buffers[number]] if sent else []
            for buffer in (*weights, *extra[number]):
                self._pending += receive(buffer, server.rank, REPLY_DATA)
            self._pending += send(packed[number], server.rank, REQUEST)
            for block in data[number]:
                self._pending += send(block, server.rank, DATA)

    def wait(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait for all replies, and read the weights that are in shared memory.

        ``PointToPoint.wait`` describes ``unless`` and the errors that may be raised.
        """
        waiting_in = f"{self._kind.name.lower()}, for the parameter servers"
        # A worker that is done waits as long as other workers train.
        endless = self._kind is Kind.END
        self._messages.wait(self._pending, waiting_in, endless=endless, unless=unless)
        if unless():
            return
        self._pending, self._in_use = [], ([], [], [])
        self.replied_s = time.monotonic()
        self.replies = [Reply.unpack(reply) for reply in self._replies]
        self.versions = versions = [reply.version for reply in self.replies]
        if any(reply.refusal for reply in self.replies):
            return
        for number, published in enumerate(self._published):
            if published is not None:
                versions[number] = published.read(self.buffers[number])


class ReplySender:
    """Sends replies to workers in the background.

    Data is copied, and sent while the server receives the next gradient, so that both directions of
    the server's network link are busy. Replies to a worker that died are dropped without an error,
    because the server checks for lost ranks itself.
    """

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages
        # For each worker, the oldest reply first. MPI reads the arrays until the messages are
        # complete.
        self._in_flight: dict[int, tuple[Sequence[np.ndarray], Sequence[PendingMessage]]] = {}
        self._pool = BufferPool(max_idle=MAX_IN_FLIGHT)

    def send(self, worker: int, reply: Reply, data: Sequence[np.ndarray]) -> None:
        """Send a reply followed by ``data``, without waiting until the worker has received it.

        If ``data`` is not empty, this may wait: at most ``MAX_IN_FLIGHT`` replies with data are
        sent at the same time.
        """
        # The worker took its last reply long ago, but MPI uses the reply's memory until the message
        # has been waited for.
        self._wait(worker)
        if data:
            with_data = [other for other, (parts, _) in self._in_flight.items() if len(parts) > 1]
            for other in with_data[: 1 - MAX_IN_FLIGHT]:
                self._wait(other)
        parts = [reply.pack(), *map(self._copy, data)]
        with contextlib.suppress(PeerLostError):
            pending = self._messages.start_send(parts[0], worker, REPLY)
            for part in parts[1:]:
                pending += self._messages.start_send(part, worker, REPLY_DATA)
            self._in_flight[worker] = parts, pending

    def finish(self) -> None:
        """Wait until workers have received all replies."""
        for worker in tuple(self._in_flight):
            self._wait(worker)

    def _copy(self, part: np.ndarray) -> np.ndarray:
        buffer = self._pool.take(part.nbytes)
        np.copyto(buffer, part.reshape(-1).view(np.uint8))
        return buffer

    def _wait(self, worker: int) -> None:
        _, pending = self._in_flight.pop(worker, ((), ()))
        with contextlib.suppress(PeerLostError):
            self._messages.wait(pending, f"parameter server, for rank {worker} to take its reply")
