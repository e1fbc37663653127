"""The agent's connection: a launcher that takes nothing is waited for without blocking."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.agent.launcher_link import LauncherLink
from hvdtrain.agent.messages import WINDOW_BYTES, Decoder, encode

TEXT = "x" * 1000


class Launcher:
    """The other end, which confirms what it is told to."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(0.2)
        self._decoder = Decoder()
        self.taken = 0

    def read(self) -> list[dict[str, Any]]:
        """All messages that have come."""
        found = []
        while True:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                return found
            found += self._decoder.feed(data)
            self.taken += len(data)

    def confirm(self, size: int) -> None:
        self._connection.sendall(encode("taken", size=size))

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def ends() -> Iterator[tuple[LauncherLink, Launcher]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield LauncherLink(ours), Launcher(theirs)


def test_no_more_than_the_window_is_under_way(ends: tuple[LauncherLink, Launcher]) -> None:
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


def test_of_states_only_the_newest_waits(ends: tuple[LauncherLink, Launcher]) -> None:
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


def test_other_messages_come_out(ends: tuple[LauncherLink, Launcher]) -> None:
    link, launcher = ends
    launcher.confirm(0)
    assert [message["kind"] for message in link.receive()] == ["taken"]


def test_a_launcher_that_is_gone_holds_nothing_up(ends: tuple[LauncherLink, Launcher]) -> None:
    link, launcher = ends
    link.send("line", stream="stdout", text="x" * 2 * WINDOW_BYTES)
    assert link.is_full
    launcher.close()
    assert link.receive() == []
    assert (link.is_lost, link.is_full) == (True, False)
    link.send("line", stream="stdout", text="x" * 2 * WINDOW_BYTES)
    assert not link.is_full
