"""The protocol between launcher and agents.

Messages are JSON objects, one per line, over TCP. Environment variables tell the agents how to
connect.

An agent first sends ``hello``. It then sends ``line``, ``status``, ``report``, ``usage`` and
``failure`` as they occur, and ``told`` when mpirun or srun sends the agent a signal. Finally it
sends ``end``, with the number of out-of-memory kills if the program failed. The launcher sends
``stop`` to signal a program, ``kill`` to kill it, and ``bye`` after ``end``, to let the agent exit.
If the job hangs, the launcher sends ``look``. The agent then makes the program print its stacks,
and answers ``looked``.

The launcher confirms received bytes with ``taken``, and delays this confirmation while ranks should
pause. An agent has at most ``WINDOW_BYTES`` unconfirmed bytes, which fit into the launcher's socket
buffer. So TCP's window never closes, even if the launcher is suspended. Therefore, a TCP time-out
always means that the other host is lost.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from hvdtrain.config import LAUNCHER
from hvdtrain.errors import LaunchError

__all__ = [
    "ATTEMPT",
    "BIND",
    "JOB",
    "OUTPUT_DIR",
    "Decoder",
    "LauncherLink",
    "connect",
    "encode",
    "format_addresses",
    "keep_alive",
    "parse_addresses",
    "receive",
]

# A random secret of the job.
JOB = "HVDTRAIN_JOB"
# With 0, ranks are not bound to cores and can use all of them.
BIND = "HVDTRAIN_BIND"
OUTPUT_DIR = "HVDTRAIN_OUTPUT_DIR"
# The number of this attempt of the job, from 1.
ATTEMPT = "HVDTRAIN_ATTEMPT"

# In characters. Longer lines are split to limit the use of memory.
MAX_LINE_LENGTH = 4 << 20
# Limit before the client has proved to be an agent.
MAX_MESSAGE_BYTES = 1 << 20
WINDOW_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 20.0
# After how many seconds and probes a connection without traffic is considered lost.
KEEPALIVE_S = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
# If several messages of one of these kinds wait, only the newest is sent.
_STATES = ("status", "report", "usage")


def format_addresses(hosts: Sequence[str], port: int) -> str:
    """Return addresses and a port in the format of the variable ``config.LAUNCHER``."""
    return " ".join([*hosts, str(port)])


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Parse the value of the variable ``config.LAUNCHER`` into pairs of host and port.

    Raises:
        LaunchError: If the value is invalid.
    """
    *hosts, port = text.split() or [""]
    if not hosts or not port.isdecimal():
        raise LaunchError(f"{LAUNCHER}={text!r} is invalid; start ranks with hvdtrain run.")
    return [(host, int(port)) for host in hosts]


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message as bytes."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Decodes messages whose bytes arrive in pieces."""

    def __init__(self) -> None:
        self.max_bytes = MAX_MESSAGE_BYTES  # maximum size of a message
        self.taken = 0  # number of bytes received
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes.

        Raises:
            LaunchError: If the data is not a message.
        """
        self.taken += len(data)
        complete, newline, rest = data.rpartition(b"\n")
        lines = []
        if newline:
            lines = bytes(self._rest + complete).split(b"\n")
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self.max_bytes:
            raise LaunchError(f"received {len(self._rest)} bytes that are not a message")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise LaunchError(f"received invalid data, not a message: {error}") from None
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise LaunchError(f"received {message!r:.80}, which is not a message")
        return messages


def receive(connection: socket.socket, decoder: Decoder) -> list[dict[str, Any]] | None:
    """Return the received messages, or None if the connection is closed or a message is invalid."""
    try:
        data = connection.recv(1 << 18)
        return decoder.feed(data) if data else None
    except (OSError, LaunchError):
        return None


def keep_alive(connection: socket.socket) -> None:
    """Configure TCP so that the loss of the other host is detected within seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_S.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000)


def connect(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    """Connect to the launcher at the first address that answers.

    Raises:
        OSError: If no address answers.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    errors: dict[str, str] = {}
    while time.monotonic() < deadline:
        for host, port in addresses:
            try:
                connection = socket.create_connection((host, port), timeout=5.0)
            except OSError as error:
                errors[f"{host}:{port}"] = error.strerror or str(error)
                continue
            keep_alive(connection)
            return connection
        time.sleep(0.2)
    details = "; ".join(f"{address}: {error}" for address, error in errors.items())
    raise OSError(
        f"the launcher can't be reached ({details}). Ranks need a TCP connection to the host of "
        "hvdtrain run; check the firewalls between them."
    )


class LauncherLink:
    """An agent's connection to the launcher. Messages are queued instead of blocking the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()
        self._unsent = bytearray()
        self._states: dict[str, bytes] = {}
        self._unconfirmed_bytes = 0
        self.is_lost = False  # whether the launcher or its host is gone

    def fileno(self) -> int:
        """Return the file descriptor, for ``selectors``."""
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether messages are held back until the launcher confirms earlier messages."""
        return bool(self._unsent or self._states) and not self.is_lost

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, or queue it if it can't be sent yet."""
        if self.is_lost:
            return
        if self._unsent and kind in _STATES:
            self._states[kind] = encode(kind, **fields)
        else:
            self._unsent += encode(kind, **fields)
            self._send_more()

    def receive(self) -> list[dict[str, Any]]:
        """Return the received messages."""
        messages = receive(self._connection, self._decoder)
        self.is_lost = self.is_lost or messages is None
        for message in messages or ():
            if message["kind"] == "taken":
                self._unconfirmed_bytes -= int(message["size"])
        self._send_more()
        return messages or []

    def _send_more(self) -> None:
        while self.is_full and self._unconfirmed_bytes < WINDOW_BYTES:
            if not self._unsent:
                self._unsent += b"".join(self._states.values())
                self._states.clear()
            part = bytes(self._unsent[: WINDOW_BYTES - self._unconfirmed_bytes])
            del self._unsent[: len(part)]
            self._unconfirmed_bytes += len(part)
            try:
                self._connection.sendall(part)
            except OSError:
                self.is_lost = True
