"""A server's answers on their way to the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.point_to_point import PendingMessage, PointToPoint
from hvdtrain.errors import PeerLostError
from hvdtrain.parameter_server.protocol import REPLY, REPLY_DATA, Reply

__all__ = ["ReplySender"]


class ReplySender:
    """Sends each worker one answer after another.

    A worker that has died gets none, which is no error: who is lost is seen elsewhere, for all of
    them together.

    Args:
        messages: To the workers.
    """

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages
        # By worker; MPI reads the words until they are taken.
        self._untaken: dict[int, tuple[np.ndarray, Sequence[PendingMessage]]] = {}

    def send(self, worker: int, reply: Reply, data: Sequence[np.ndarray]) -> None:
        """Send an answer; return when data that come with it are taken, and at once without any.

        A worker that says nothing any more would keep the others waiting otherwise.

        Args:
            worker: By rank; it has asked for this and so has taken the answer before.
            reply: The words.
            data: What follows them.
        """
        words = reply.pack()
        with contextlib.suppress(PeerLostError):
            # Taken long ago, but MPI keeps what belongs to a message until somebody has asked.
            self._await_taken(worker)
            pending = self._messages.start_send(words, worker, REPLY)
            for part in data:
                pending += self._messages.start_send(part, worker, REPLY_DATA)
            self._untaken[worker] = words, pending
            if data:
                self._await_taken(worker)

    def finish(self) -> None:
        """Return when every answer is taken."""
        for worker in tuple(self._untaken):
            with contextlib.suppress(PeerLostError):
                self._await_taken(worker)

    def _await_taken(self, worker: int) -> None:
        _, pending = self._untaken.pop(worker, (None, ()))
        self._messages.wait(pending, f"parameter server, for rank {worker} to take its answer")
