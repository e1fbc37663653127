from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.agent.messages import (
    MAX_MESSAGE_BYTES,
    WINDOW_BYTES,
    Decoder,
    LauncherLink,
    encode,
    format_addresses,
    keep_alive,
    parse_addresses,
)
from hvdtrain.errors import LaunchError

MESSAGES = [
    {"kind": "hello", "rank": 0, "host": "node1"},
    {"kind": "line", "stream": "stdout", "text": 'höher "━━"\n\r\x00 🎉'},
    {"kind": "bye"},
]


def encoded_messages() -> bytes:
    return b"".join(encode(**message) for message in MESSAGES)


def test_a_message_is_one_line() -> None:
    assert encode("stop", signal=15, grace_s=0.5) == b'{"kind":"stop","signal":15,"grace_s":0.5}\n'
    assert encoded_messages().count(b"\n") == len(MESSAGES)


def test_messages_are_decoded_from_any_parts() -> None:
    data = encoded_messages()
    for cut in range(len(data) + 1):
        decoder = Decoder()
        assert [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])] == MESSAGES, f"cut at {cut}"
    decoder = Decoder()
    assert [m for at in range(len(data)) for m in decoder.feed(data[at : at + 1])] == MESSAGES


def test_a_message_is_returned_once_complete() -> None:
    decoder = Decoder()
    assert decoder.feed(b"") == []
    assert decoder.feed(encode("bye")[:-1]) == []
    assert decoder.feed(b"\n" + encode("bye")[:3]) == [{"kind": "bye"}]


INVALID = {
    "text": b"GET / HTTP/1.1\r\n",
    "empty-line": b"\n",
    "long-list": b"[" + b"1," * 1000 + b"1]\n",
    "text-in-quotes": b'"kind"\n',
    "no-kind": b"{}\n",
    "kind-no-text": b'{"kind":1}\n',
    "after-a-good-one": b'{"kind":"bye"}\nno\n',
    "nested-too-deep": b"[" * 200_000 + b"\n",
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
def test_invalid_data_is_an_error(data: bytes) -> None:
    with pytest.raises(LaunchError, match="not a message") as raised:
        Decoder().feed(data)
    assert len(str(raised.value)) < 200


def test_a_message_that_is_too_long_is_an_error() -> None:
    decoder = Decoder()
    assert decoder.feed(b"x" * MAX_MESSAGE_BYTES) == []
    with pytest.raises(LaunchError, match="not a message"):
        decoder.feed(b"x")


def test_keep_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=5) as connection:
            keep_alive(connection)
            assert connection.gettimeout() is None
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(
    "hosts", [["127.0.0.1"], ["10.0.0.1", "fd00::1", "fe80::1%eth0", "head.cluster"]]
)
def test_addresses_round_trip(hosts: list[str]) -> None:
    text = format_addresses(hosts, 4711)
    assert parse_addresses(text) == [(host, 4711) for host in hosts]


@pytest.mark.parametrize("text", ["", " ", "4711", "10.0.0.1", "10.0.0.1:4711", "10.0.0.1 -1"])
def test_invalid_addresses_are_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"HVDTRAIN_LAUNCHER='.*start ranks with hvdtrain run"):
        parse_addresses(text)


TEXT = "x" * 1000


class Launcher:
    """The launcher's end, which confirms bytes on request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(0.2)
        self._decoder = Decoder()
        self.taken = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all messages received so far."""
        messages = []
        while True:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                return messages
            messages += self._decoder.feed(data)
            self.taken += len(data)

    def confirm(self, size: int) -> None:
        self._connection.sendall(encode("taken", size=size))

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def ends() -> Iterator[tuple[LauncherLink, Launcher]]:
    agent_end, launcher_end = socket.socketpair()
    with agent_end, launcher_end:
        yield LauncherLink(agent_end), Launcher(launcher_end)


def test_unconfirmed_bytes_are_limited_to_the_window(ends: tuple[LauncherLink, Launcher]) -> None:
    link, launcher = ends
    for number in range(200):
        link.send("line", stream="stdout", text=f"{number} {TEXT}")
    link.send("end", code=0)
    assert link.is_full
    messages = launcher.read()
    assert launcher.taken == WINDOW_BYTES
    while link.is_full:
        launcher.confirm(WINDOW_BYTES // 2)
        link.receive()
        messages += launcher.read()
    *lines, end = messages
    assert [line["text"] for line in lines] == [f"{number} {TEXT}" for number in range(200)]
    assert end == {"kind": "end", "code": 0}


def test_only_the_newest_state_is_queued(ends: tuple[LauncherLink, Launcher]) -> None:
    link, launcher = ends
    link.send("report", step=0)
    link.send("line", stream="stdout", text="x" * WINDOW_BYTES)
    for step in range(1, 1000):
        link.send("report", step=step)
        link.send("usage", cpu=step)
    launcher.confirm(WINDOW_BYTES)
    link.receive()
    messages = launcher.read()
    assert [message["kind"] for message in messages] == ["report", "line", "report", "usage"]
    assert (messages[2]["step"], messages[3]["cpu"]) == (999, 999)
    assert not link.is_full


def test_a_lost_launcher_does_not_block(ends: tuple[LauncherLink, Launcher]) -> None:
    link, launcher = ends
    link.send("line", stream="stdout", text="x" * 2 * WINDOW_BYTES)
    assert link.is_full
    launcher.close()
    assert link.receive() == []
    assert (link.is_lost, link.is_full) == (True, False)
    link.send("line", stream="stdout", text="x" * 2 * WINDOW_BYTES)
    assert not link.is_full
