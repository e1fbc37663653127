"""What a worker has asked all servers, while it is on its way, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hvdtrain.collectives.point_to_point import PendingMessage, PointToPoint
from hvdtrain.parameter_server.protocol import DATA, REPLY, REPLY_DATA, REQUEST, Reply, Request
from hvdtrain.parameter_server.sharding import Shard
from hvdtrain.parameter_server.shared_weights import PublishedWeights

__all__ = ["PendingRequest", "ServerHandle", "Wanted"]

# Which weights are to come: newest ones may be newer than the answer, these are not.
Wanted = Literal["newest", "these", "none"]


@dataclass
class ServerHandle:
    """What a worker knows of a server: where it is, its shard, and the weights it got from it."""

    rank: int
    shard: Shard
    published: PublishedWeights | None  # where its weights are read; None where it sends them
    step: int = 0
    version: int = 0


class PendingRequest:
    """Requests to all servers, which begin to travel at once.

    All is received at once: a server does nothing else until its answer has been taken, so that
    whoever took one after another could wait for a server that waits for it.

    Args:
        messages: To the servers.
        servers: All of them.
        requests: One for each server.
        what: Names them for whoever asks what this rank waits for.
        data: For each server, what follows the request; must stay as it is until ``wait`` returns.
        buffers: For each server, where weights go.
        wanted: Whether there are any.
        more: For each server, where to put what follows the weights.
        endless: As for ``PointToPoint.wait``.
    """

    def __init__(
        self,
        messages: PointToPoint,
        servers: Sequence[ServerHandle],
        requests: Sequence[Request],
        what: str,
        *,
        data: Sequence[Sequence[np.ndarray]] | None,
        buffers: Sequence[np.ndarray],
        wanted: Wanted,
        more: Sequence[Sequence[np.ndarray]] | None = None,
        endless: bool = False,
    ) -> None:
        self._messages = messages
        self._what = what
        self._endless = endless
        self._published = [peer.published if wanted == "newest" else None for peer in servers]
        self._answers = [Reply.buffer() for _ in servers]
        # What is sent must live until it has been.
        self._sent: list[np.ndarray] = []
        self._pending: list[PendingMessage] = []
        self.buffers = buffers
        self.replies: list[Reply] = []
        """Once they have come."""
        self.versions: list[int] = []
        """Of the weights in ``buffers``."""
        self.heard_s = 0.0
        """When the answers came, on the monotonic clock."""
        for number, peer in enumerate(servers):
            start_receive, start_send = messages.start_receive, messages.start_send
            self._pending += start_receive(self._answers[number], peer.rank, REPLY)
            comes = wanted != "none" and self._published[number] is None
            parts = [buffers[number]] if comes else []
            for buffer in (*parts, *(more[number] if more is not None else ())):
                self._pending += start_receive(buffer, peer.rank, REPLY_DATA)
            words, blocks = requests[number].pack(), data[number] if data is not None else ()
            self._pending += start_send(words, peer.rank, REQUEST)
            for block in blocks:
                self._pending += start_send(block, peer.rank, DATA)
            self._sent += [words, *blocks]

    def wait(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Return when all answers have come, and weights that are read have been.

        Args:
            unless: As for ``PointToPoint.wait``; what was asked is of no use then.

        Raises:
            PeerFailedError: Another rank failed or left meanwhile.
            CollectiveTimeoutError: The time is over.
        """
        what = f"{self._what}, for the parameter servers"
        self._messages.wait(self._pending, what, endless=self._endless, unless=unless)
        if unless():
            return
        self._pending, self._sent = [], []
        self.heard_s = time.monotonic()
        self.replies = [Reply.unpack(answer) for answer in self._answers]
        self.versions = [reply.version for reply in self.replies]
        if any(reply.refusal for reply in self.replies):
            return
        for number, published in enumerate(self._published):
            if published is not None:
                # Of the reply's version, or newer.
                self.versions[number] = published.read(self.buffers[number])
