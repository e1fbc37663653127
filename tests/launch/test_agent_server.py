"""The launcher's connections to agents. The tests use real sockets and act as agents."""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdtrain.agent.messages import (
    MAX_LINE_LENGTH,
    MAX_MESSAGE_BYTES,
    WINDOW_BYTES,
    Decoder,
    encode,
)
from hvdtrain.agent.rank_report import FailureRecord
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.console import Console


class Harness:
    """A server for three ranks, its console, and agents, which are sockets."""

    def __init__(self, stack: contextlib.ExitStack, **options: Any) -> None:
        self._stack = stack
        self.out, self.err = io.StringIO(), io.StringIO()
        console = Console(self.out, self.err, ranks=3)
        self.server = stack.enter_context(
            contextlib.closing(AgentServer(3, console, local=True, **options))
        )

    def until(self, true: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, (self.out.getvalue(), self.err.getvalue())
            self.server.step(0.01)

    def for_s(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > until)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        return self._stack.enter_context(connection)

    def agent(self, rank: int) -> socket.socket:
        """Return an agent that has sent its hello."""
        connection = self.connect()
        connection.sendall(self.hello(rank=rank))
        self.until(lambda: rank in self.server.hosts())
        return connection

    def hello(self, **changes: Any) -> bytes:
        return encode(
            **{"kind": "hello", "job": self.server.secret, "rank": 0, "host": "a", **changes}
        )

    def is_closed(self, connection: socket.socket) -> bool:
        """Return whether the server has closed a connection without an answer."""
        self.server.step(0.01)
        connection.settimeout(0.05)
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    def ends(self) -> dict[int, int | None]:
        return {end.rank: end.code for end in self.server.ends}


@pytest.fixture
def harness() -> Iterator[Harness]:
    with contextlib.ExitStack() as stack:
        yield Harness(stack)


def line(text: str, stream: str = "stderr") -> bytes:
    return encode("line", stream=stream, text=text)


def received(connection: socket.socket) -> list[dict[str, Any]]:
    connection.settimeout(0.2)
    decoder, messages = Decoder(), []
    with contextlib.suppress(TimeoutError):
        while data := connection.recv(4096):
            messages += decoder.feed(data)
    return messages


def test_hello(harness: Harness) -> None:
    hello = harness.hello(rank=2, host="node2")
    connection = harness.connect()
    for at in range(len(hello)):
        connection.sendall(hello[at : at + 1])
        harness.server.step(0.0)
    harness.until(lambda: harness.server.connected == 1)
    harness.agent(0)
    assert (harness.server.hosts(), harness.server.running) == ({2: "node2", 0: "a"}, [2, 0])


REFUSED: dict[str, dict[str, Any]] = {
    "other-secret": {"job": "0" * 32},
    "null-secret": {"job": None},
    "number-for-a-secret": {"job": 7},
    "invalid-unicode": {"job": "\ud800"},
    "rank-too-high": {"rank": 3},
    "negative-rank": {"rank": -1},
    "null-rank": {"rank": None},
    "list-for-a-rank": {"rank": [0]},
    "connected-rank": {"rank": 1},
    "other-message": {"kind": "end", "code": 0},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_an_invalid_hello_is_refused(harness: Harness, changes: dict[str, Any]) -> None:
    agent = harness.agent(1)
    stranger = harness.connect()
    stranger.sendall(harness.hello(**changes) + line("hello"))
    harness.until(lambda: harness.is_closed(stranger))
    assert harness.server.hosts() == {1: "a"}
    agent.sendall(line("still here"))
    harness.until(lambda: harness.err.getvalue() != "")
    assert harness.err.getvalue() == "[1] still here\n"


GARBAGE = {"http": b"GET / HTTP/1.1\r\n\r\n", "endless": b"x" * (MAX_MESSAGE_BYTES + 1)}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_invalid_data_closes_the_connection(harness: Harness, garbage: bytes) -> None:
    stranger = harness.connect()
    with contextlib.suppress(OSError):
        for at in range(0, len(garbage), 1 << 16):
            stranger.sendall(garbage[at : at + (1 << 16)])
            harness.server.step(0.01)
    harness.until(lambda: harness.is_closed(stranger))
    assert harness.server.connected == 0
    assert harness.ends() == {}


def test_an_agent_that_sends_invalid_data_counts_as_lost(harness: Harness) -> None:
    harness.agent(0).sendall(b"garbage\n")
    harness.until(lambda: not harness.server.running)
    assert harness.ends() == {0: None}


def test_a_silent_client_does_not_block(harness: Harness) -> None:
    silent = [harness.connect() for _ in range(20)]
    silent[0].sendall(b'{"kind":')
    agent = harness.agent(0)
    agent.sendall(line("epoch 1", "stdout"))
    harness.until(lambda: harness.out.getvalue() == "[0] epoch 1\n", timeout_s=5)
    silent[1].close()
    agent.sendall(line("epoch 2", "stdout"))
    harness.until(lambda: harness.out.getvalue().endswith("[0] epoch 2\n"), timeout_s=5)
    assert harness.server.hosts() == {0: "a"}


def test_a_local_job_listens_only_on_this_host(harness: Harness) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", harness.server.port), timeout=5)
    console = Console(io.StringIO(), io.StringIO(), ranks=1)
    with contextlib.closing(AgentServer(1, console, local=False)) as everywhere:
        socket.create_connection(("127.0.0.2", everywhere.port), timeout=5).close()


def test_lines_and_ends_are_received(harness: Harness) -> None:
    brief, agent = harness.connect(), harness.agent(1)
    brief.sendall(harness.hello() + line("a", "stdout") + line("b") + encode("end", code=0))
    harness.until(lambda: 0 in harness.ends())
    agent.sendall(encode("told", signal=15) + line("c") + encode("end", code=7))
    harness.until(lambda: not harness.server.running)
    assert (harness.out.getvalue(), harness.err.getvalue()) == ("[0] a\n", "[0] b\n[1] c\n")
    assert [(e.rank, e.host, e.code, e.stderr, e.was_signalled) for e in harness.server.ends] == [
        (0, "a", 0, ("b",), False),
        (1, "a", 7, ("c",), True),
    ]


def test_hidden_lines_are_neither_shown_nor_recorded() -> None:
    lines: list[tuple[int, str, str]] = []
    with contextlib.ExitStack() as stack:
        harness = Harness(stack, is_hidden="noise".__eq__, on_line=lambda *line: lines.append(line))
        agent = harness.agent(0)
        agent.sendall(line("noise") + line("words") + line("noise", "stdout"))
        agent.sendall(encode("end", code=1))
        harness.until(lambda: not harness.server.running)
        assert (harness.out.getvalue(), harness.err.getvalue()) == ("[0] noise\n", "[0] words\n")
        assert harness.server.ends[0].stderr == ("words",)
    assert lines == [(0, "stderr", "words"), (0, "stdout", "noise")]


def test_a_line_of_any_length_is_one_line(harness: Harness) -> None:
    text = "é" * MAX_LINE_LENGTH
    connection = harness.agent(0)
    data = line(text, "stdout")
    for at in range(0, len(data), WINDOW_BYTES):
        connection.sendall(data[at : at + WINDOW_BYTES])
        harness.server.step(0.0)
    harness.until(lambda: harness.out.getvalue() != "")
    assert harness.out.getvalue() == f"[0] {text}\n"


def test_agents_may_send_more_unless_the_console_is_blocked() -> None:
    with contextlib.ExitStack() as stack:
        full = True
        harness = Harness(stack, holds_up=lambda: full)
        agent = harness.agent(0)
        data = line("x" * WINDOW_BYTES, "stdout")
        agent.sendall(data)
        harness.until(lambda: harness.out.getvalue() != "")
        assert received(agent) == []
        full = False
        harness.server.step(0.01)
        [taken] = received(agent)
        assert taken == {"kind": "taken", "size": len(harness.hello()) + len(data)}
        agent.sendall(line("short"))
        harness.until(lambda: harness.err.getvalue() != "")
        assert received(agent) == [], "not after each message"


def test_a_lost_agent_has_no_exit_code(harness: Harness) -> None:
    lost, ended, well = (harness.agent(rank) for rank in range(3))
    ended.sendall(encode("end", code=0))
    harness.until(lambda: 1 in harness.ends())
    ended.close()
    lost.sendall(line("last line"))
    lost.close()
    harness.until(lambda: harness.server.running == [2])
    assert harness.ends() == {1: 0, 0: None}
    assert harness.server.ends[1].stderr == ("last line",)
    well.sendall(line("well"))
    harness.until(lambda: harness.err.getvalue().endswith("[2] well\n"))


def test_stop_reaches_running_ranks_and_dismiss_ended_ones(harness: Harness) -> None:
    running, ended, lost = (harness.agent(rank) for rank in range(3))
    ended.sendall(encode("end", code=0))
    lost.close()
    harness.until(lambda: harness.server.running == [0])
    harness.server.stop(2, 1.5, write_s=8.0)
    harness.server.dismiss()
    stop = {"kind": "stop", "signal": 2, "grace_s": 1.5, "write_s": 8.0}
    assert received(running) == [stop]
    assert received(ended) == [{"kind": "bye"}]
    running.sendall(encode("end", code=130))
    harness.until(lambda: not harness.server.running)
    assert [end.was_signalled for end in harness.server.ends if end.rank == 0] == [True]


def test_a_rank_that_connects_late_is_also_stopped(harness: Harness) -> None:
    harness.server.stop(10, 60.0)
    late = harness.agent(0)
    stop = {"kind": "stop", "signal": 10, "grace_s": 60.0, "write_s": 0.0}
    assert received(late) == [stop]
    late.sendall(encode("end", code=75))
    harness.until(lambda: not harness.server.running)
    assert harness.server.ends[0].was_signalled


def test_an_agent_that_can_not_be_reached_is_lost(harness: Harness) -> None:
    agent = harness.agent(0)
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    agent.close()
    deadline = time.monotonic() + 10
    while harness.server.running and time.monotonic() < deadline:
        harness.server.stop(15, 1.0)
    assert harness.ends() == {0: None}
    harness.server.step(0.01)
    harness.server.dismiss()


def test_invalid_reports_are_ignored(harness: Harness) -> None:
    agent = harness.agent(1)
    agent.sendall(encode("report", step=4, phase="training"))
    harness.until(lambda: harness.server.reports.step == 4)
    agent.sendall(encode("report", step="5") + encode("report", pid=[1]) + line("well"))
    harness.until(lambda: harness.err.getvalue() == "[1] well\n")
    assert harness.server.reports.latest[1].step == 4


def test_the_end_includes_the_failure_record(harness: Harness) -> None:
    first, second, invalid = (harness.agent(rank) for rank in range(3))
    failure = {"exception": "KeyError", "message": "'x'", "traceback": "", "time_s": 5.0}
    first.sendall(encode("failure", **failure) + line("well"))
    harness.until(lambda: harness.err.getvalue() == "[0] well\n")
    # The first rank exits later, but it failed earlier.
    second.sendall(encode("failure", **failure) + encode("end", code=1))
    harness.until(lambda: 1 in harness.ends())
    first.sendall(line("late") + encode("end", code=1))
    invalid.sendall(encode("failure", exception=3) + encode("end", code=1))
    harness.until(lambda: not harness.server.running)
    records = {end.rank: end.record for end in harness.server.ends}
    record = FailureRecord(exception="KeyError", message="'x'", time_s=5.0)
    assert records == {0: record, 1: record, 2: None}
    assert min(harness.server.ends, key=lambda end: end.failed_at).rank == 0


def test_a_timeout_at_the_start_of_mpi_is_recognized(harness: Harness) -> None:
    """MPI itself also ends a process with exit code 1, for example without Slurm's PMI."""
    waits, aborts, imports = (harness.agent(rank) for rank in range(3))
    timeout = line("Timeout (0:10:00)!")
    abort = line("*** An error occurred in MPI_Init_thread")
    starts, end = encode("report", phase="starting MPI"), encode("end", code=1)
    waits.sendall(starts + timeout + end)
    aborts.sendall(starts + abort + end)
    imports.sendall(encode("report", phase="") + timeout + end)
    harness.until(lambda: not harness.server.running)
    assert {end.rank: end.timed_out for end in harness.server.ends} == {0: True, 1: False, 2: False}


def test_probe(harness: Harness) -> None:
    stopped, ended = harness.agent(0), harness.agent(1)
    ended.sendall(encode("end", code=0))
    harness.until(lambda: 1 in harness.ends())
    harness.server.probe()
    assert (received(stopped), received(ended)) == ([{"kind": "look"}], [])
    stopped.sendall(encode("looked", stopped=True))
    harness.until(lambda: harness.server.stopped == {0: True})


def test_a_dropped_rank_has_no_end(harness: Harness) -> None:
    dead, _ = harness.agent(0), harness.agent(1)
    dead.sendall(encode("end", code=137))
    harness.until(lambda: 0 in harness.ends())
    harness.server.drop_lost(harness.server.ends[0])
    assert (harness.ends(), harness.server.dropped, harness.server.running) == ({}, [0], [1])


LIMITED = """
import io, resource, sys
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.console import Console
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
console = Console(io.StringIO(), io.StringIO(), ranks=400)
AgentServer(400, console, local=True).close()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("most", [1000, 300])
def test_the_limit_of_open_files_is_raised_or_reported(most: int) -> None:
    argv = [sys.executable, "-c", LIMITED, str(most)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if most == 1000:
        assert done.stdout == "(600, 1000)\n", done
    else:
        assert "400 ranks need 600 open files in the launcher" in done.stderr
        assert "the hard limit is 300 (ulimit -Hn)" in done.stderr
