"""The agent's end of its connection to the launcher."""

from __future__ import annotations

import socket
from typing import Any

from hvdtrain.agent.messages import WINDOW_BYTES, Decoder, encode, receive

__all__ = ["LauncherLink"]

# Where messages wait, only the newest of these kinds is of use.
_STATES = ("status", "report", "usage")


class LauncherLink:
    """Sends messages and never waits for the launcher: what it has not taken yet stays here.

    Attributes:
        is_lost: Whether the launcher or its host is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()
        self._unsent = bytearray()
        self._states: dict[str, bytes] = {}
        self._under_way = 0
        self.is_lost = False

    def fileno(self) -> int:
        """The socket as ``selectors`` take it."""
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether messages wait until the launcher has taken others."""
        return bool(self._unsent or self._states) and not self.is_lost

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, now or once the launcher takes it."""
        if self.is_lost:
            return
        if self._unsent and kind in _STATES:
            self._states[kind] = encode(kind, **fields)
        else:
            self._unsent += encode(kind, **fields)
            self._send_more()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come."""
        messages = receive(self._connection, self._decoder)
        self.is_lost = self.is_lost or messages is None
        for message in messages or ():
            if message["kind"] == "taken":
                self._under_way -= int(message["size"])
        self._send_more()
        return messages or []

    def _send_more(self) -> None:
        while self.is_full and self._under_way < WINDOW_BYTES:
            if not self._unsent:
                self._unsent += b"".join(self._states.values())
                self._states.clear()
            part = bytes(self._unsent[: WINDOW_BYTES - self._under_way])
            del self._unsent[: len(part)]
            self._under_way += len(part)
            try:
                self._connection.sendall(part)
            except OSError:
                self.is_lost = True
