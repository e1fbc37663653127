"""The protocol between launcher and agents: variables, and one JSON object a line over TCP.

An agent begins with ``hello``; then it sends ``line``, ``status``, ``report``, ``failure`` and
``told`` as they come, and at last ``end``, with what the kernel killed where the program failed.
The launcher sends ``stop``, and ``bye`` for an ``end`` that it has noted. Asked to ``look`` at a
rank that hangs, the agent has its program print its stacks, and answers with ``looked``.

The launcher also confirms by ``taken`` how many bytes it has received, and withholds that while the
ranks should write less. An agent never has more than ``WINDOW_BYTES`` under way, which the
launcher's kernel accepts in any case. So neither a launcher that is stopped nor one that withholds
``taken`` closes TCP's window, and TCP's own time-outs mean that the other host is gone.
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

# A random word that only this job knows.
JOB = "HVDTRAIN_JOB"
# 0 leaves the ranks to the scheduler, on all cores.
BIND = "HVDTRAIN_BIND"
OUTPUT_DIR = "HVDTRAIN_OUTPUT_DIR"
# The number of this start of the job by one hvdtrain run, from 1.
ATTEMPT = "HVDTRAIN_ATTEMPT"

# Characters; a longer line is passed on in parts, as it has to fit into memory.
LONGEST_LINE = 4 << 20
# The limit for unknown clients on the port: they can't fill the memory.
MOST_BYTES = 1 << 20
WINDOW_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 20.0
# After that long without an answer a silent connection counts as lost.
KEEPALIVE_S = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}


def format_addresses(hosts: Sequence[str], port: int) -> str:
    """Return the value of ``config.LAUNCHER``."""
    return " ".join([*hosts, str(port)])


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Read what ``format_addresses`` wrote: pairs of host and port.

    Raises:
        LaunchError: It is something else.
    """
    *hosts, port = text.split() or [""]
    if not hosts or not port.isdecimal():
        raise LaunchError(f"{LAUNCHER}={text!r} names no launcher; start ranks with hvdtrain run.")
    return [(host, int(port)) for host in hosts]


# Where messages wait, only the newest of these kinds is of use.
_STATES = ("status", "report", "usage")


def encode(kind: str, **fields: Any) -> bytes:
    """Return one message as bytes."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Turns bytes, as they arrive, into complete messages.

    Attributes:
        most_bytes: How long a message may be.
        taken: How many bytes have arrived.
    """

    def __init__(self) -> None:
        self.most_bytes = MOST_BYTES
        self.taken = 0
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes.

        Raises:
            LaunchError: The other side uses another protocol.
        """
        self.taken += len(data)
        complete, newline, rest = data.rpartition(b"\n")
        lines = []
        if newline:
            lines = bytes(self._rest + complete).split(b"\n")
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self.most_bytes:
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
    """Return the received messages; None at the connection's end or for an invalid message."""
    try:
        data = connection.recv(1 << 18)
        return decoder.feed(data) if data else None
    except (OSError, LaunchError):
        return None


def keep_alive(connection: socket.socket) -> None:
    """Detect the loss of the other host within a few seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_S.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000)


def connect(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    """Connect to the launcher, over the first of its addresses that answers.

    Raises:
        OSError: No address answers.
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
    tried = "; ".join(f"{address}: {why}" for address, why in errors.items())
    raise OSError(
        f"the launcher can't be reached ({tried}). Ranks need a TCP connection to the host where "
        "hvdtrain run was started; look for a firewall between them."
    )


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
        """Send a message, now or when the launcher accepts it."""
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
