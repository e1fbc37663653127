"""Messages arrive whole, however the network cuts them; what is none is refused."""

from __future__ import annotations

import socket

import pytest

from hvdtrain.agent.messages import (
    MOST_BYTES,
    Decoder,
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


def wire() -> bytes:
    return b"".join(encode(**message) for message in MESSAGES)


def test_a_message_is_one_line() -> None:
    assert encode("stop", signal=15, grace_s=0.5) == b'{"kind":"stop","signal":15,"grace_s":0.5}\n'
    assert wire().count(b"\n") == len(MESSAGES)


def test_any_cut_gives_the_same_messages() -> None:
    data = wire()
    for cut in range(len(data) + 1):
        decoder = Decoder()
        assert [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])] == MESSAGES, f"cut at {cut}"
    decoder = Decoder()
    assert [m for at in range(len(data)) for m in decoder.feed(data[at : at + 1])] == MESSAGES


def test_a_message_comes_as_soon_as_it_is_complete() -> None:
    decoder = Decoder()
    assert decoder.feed(b"") == []
    assert decoder.feed(encode("bye")[:-1]) == []
    assert decoder.feed(b"\n" + encode("bye")[:3]) == [{"kind": "bye"}]


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n",
    "binary": b"\x16\x03\x01\xff\x00\n",
    "empty-line": b"\n",
    "list": b"[1]\n",
    "long-list": b"[" + b"1," * 1000 + b"1]\n",
    "number": b"12\n",
    "text-in-quotes": b'"kind"\n',
    "no-kind": b"{}\n",
    "kind-no-text": b'{"kind":1}\n',
    "half": b'{"kind":\n',
    "after-a-good-one": b'{"kind":"bye"}\nno\n',
    "nested-too-deep": b"[" * 200_000 + b"\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(LaunchError, match="no message") as raised:
        Decoder().feed(data)
    assert len(str(raised.value)) < 200


def test_what_grows_too_long_is_refused() -> None:
    decoder = Decoder()
    assert decoder.feed(b"x" * MOST_BYTES) == []
    with pytest.raises(LaunchError, match="no message"):
        decoder.feed(b"x")


def test_a_silent_connection_is_watched() -> None:
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
def test_addresses_are_read_as_written(hosts: list[str]) -> None:
    text = format_addresses(hosts, 4711)
    assert parse_addresses(text) == [(host, 4711) for host in hosts]


@pytest.mark.parametrize("text", ["", " ", "4711", "10.0.0.1", "10.0.0.1:4711", "10.0.0.1 -1"])
def test_other_addresses_are_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"HVDTRAIN_LAUNCHER='.*start ranks with hvdtrain run"):
        parse_addresses(text)
