"""Messages from one rank to another, beside the collectives; every wait has an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.alarm import Alarm
from hvdtrain.collectives.layout import MESSAGE_BYTES
from hvdtrain.collectives.waiting import Patience

__all__ = ["Messages"]


class Messages:
    """Point-to-point messages of bytes.

    Ranks are the first numbers of the engine's. Nothing is serialised, and what is sent travels
    from the caller's own memory. A rank that leaves while another waits here is an error there:
    an operation has to come after the last message.

    Args:
        mpi: The ``mpi4py.MPI`` module.
        comm: A communicator of all ranks, used by nothing else.
        alarm: Looked at while waiting is long.
        timeout_s: After that many seconds waiting is an error.
        local_size: Ranks on this host; see ``Patience``.
    """

    def __init__(
        self, mpi: ModuleType, comm: Any, alarm: Alarm, timeout_s: float, local_size: int
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._patience = Patience(alarm, timeout_s, local_size, needs_all=True)
        self._endless = Patience(alarm, math.inf, local_size, needs_all=True)
        self._inside = ""
        # MPI may still write to the buffers of what was given up.
        self._abandoned: list[Any] = []

    @property
    def waiting_in(self) -> str:
        """What this rank waits for, if it does; another thread may ask."""
        return self._inside

    def start_send(self, data: np.ndarray, to: int, tag: int) -> list[Any]:
        """Begin to send; ``data`` must stay as it is until ``wait`` has returned.

        Args:
            data: Contiguous, of any type.
            to: The rank.
            tag: Must be the same where it is received.

        Returns:
            For ``wait``.
        """
        return [self._comm.Isend([part, self._mpi.BYTE], to, tag) for part in _parts(data)]

    def start_receive(self, buffer: np.ndarray, source: int, tag: int) -> list[Any]:
        """Begin to receive as many bytes as ``buffer`` has; returns what ``wait`` takes."""
        return [self._comm.Irecv([part, self._mpi.BYTE], source, tag) for part in _parts(buffer)]

    def wait(
        self,
        pending: Sequence[Any],
        waiting_in: str,
        *,
        endless: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when all of them are done.

        Args:
            pending: What ``start_send`` and ``start_receive`` returned.
            waiting_in: For errors, and for whoever asks.
            endless: Wait as long as no rank fails, because the other side gives up in time.
            unless: Whether to give them up instead of waiting on; asked often.

        Raises:
            PeerFailedError: Another rank failed or left meanwhile.
            CollectiveTimeoutError: The time is over.
        """
        requests = list(pending)
        patience = self._endless if endless else self._patience

        def over() -> bool:
            return unless() or self._mpi.Request.Testall(requests)

        self._wait_until(over, patience, waiting_in)
        if unless():
            self._abandoned += requests

    def receive_any(self, buffer: np.ndarray, tag: int, waiting_in: str) -> int:
        """Wait for a message from whichever rank; returns which.

        Args:
            buffer: Takes it; as many bytes as it has.
            tag: Of the message.
            waiting_in: For errors, and for whoever asks.

        Raises:
            PeerFailedError: Another rank failed or left meanwhile.
            CollectiveTimeoutError: None came in time.
        """
        status = self._mpi.Status()
        found: list[Any] = []

        def came() -> bool:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status)
            if message is not None:
                found.append(message)
            return bool(found)

        self._wait_until(came, self._patience, waiting_in)
        source = int(status.Get_source())
        found[0].Recv([buffer.view(np.uint8), self._mpi.BYTE])
        return source

    def _wait_until(self, ready: Callable[[], bool], patience: Patience, waiting_in: str) -> None:
        self._inside = waiting_in
        patience.until(ready, waiting_in)
        self._inside = ""


def _parts(data: np.ndarray) -> list[np.ndarray]:
    flat = data.reshape(-1).view(np.uint8)
    return [flat[s : s + MESSAGE_BYTES] for s in range(0, flat.size, MESSAGE_BYTES)]
