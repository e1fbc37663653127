"""The launcher's end of its agents' connections: real sockets, whose other ends are the tests'."""

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


class Desk:
    """A server for three ranks, its console, and agents that are only sockets."""

    def __init__(self, stack: contextlib.ExitStack, **options: Any) -> None:
        self._stack = stack
        self.out, self.err = io.StringIO(), io.StringIO()
        console = Console(self.out, self.err, ranks=3, with_host=False, chief_only=False)
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
        """One that has said hello."""
        connection = self.connect()
        connection.sendall(self.hello(rank=rank))
        self.until(lambda: rank in self.server.hosts())
        return connection

    def hello(self, **changes: Any) -> bytes:
        return encode(
            **{"kind": "hello", "job": self.server.job, "rank": 0, "host": "a", **changes}
        )

    def hung_up(self, connection: socket.socket) -> bool:
        """Whether the server has closed it, without a word."""
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
def desk() -> Iterator[Desk]:
    with contextlib.ExitStack() as stack:
        yield Desk(stack)


def line(text: str, stream: str = "stderr") -> bytes:
    return encode("line", stream=stream, text=text)


def received(connection: socket.socket) -> list[dict[str, Any]]:
    """All messages that have come."""
    connection.settimeout(0.2)
    decoder, found = Decoder(), []
    with contextlib.suppress(TimeoutError):
        while data := connection.recv(4096):
            found += decoder.feed(data)
    return found


def test_agents_say_hello(desk: Desk) -> None:
    hello = desk.hello(rank=2, host="node2")
    connection = desk.connect()
    for at in range(len(hello)):
        connection.sendall(hello[at : at + 1])
        desk.server.step(0.0)
    desk.until(lambda: desk.server.connected == 1)
    desk.agent(0)
    assert (desk.server.hosts(), desk.server.running) == ({2: "node2", 0: "a"}, [2, 0])


REFUSED: dict[str, dict[str, Any]] = {
    "another job": {"job": "0" * 32},
    "no job": {"job": None},
    "a number": {"job": 7},
    "no character": {"job": "\ud800"},
    "a rank too many": {"rank": 3},
    "a rank below 0": {"rank": -1},
    "no rank": {"rank": None},
    "a list": {"rank": [0]},
    "a rank that is there": {"rank": 1},
    "no hello": {"kind": "end", "code": 0},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_who_does_not_belong_here_is_refused(desk: Desk, changes: dict[str, Any]) -> None:
    mine = desk.agent(1)
    stranger = desk.connect()
    stranger.sendall(desk.hello(**changes) + line("I am in"))
    desk.until(lambda: desk.hung_up(stranger))
    assert desk.server.hosts() == {1: "a"}
    mine.sendall(line("still here"))
    desk.until(lambda: desk.err.getvalue() != "")
    assert desk.err.getvalue() == "[1] still here\n"


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "endless": b"x" * (MAX_MESSAGE_BYTES + 1),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_closes_the_connection(desk: Desk, garbage: bytes) -> None:
    stranger = desk.connect()
    with contextlib.suppress(OSError):
        for at in range(0, len(garbage), 1 << 16):
            stranger.sendall(garbage[at : at + (1 << 16)])
            desk.server.step(0.01)
    desk.until(lambda: desk.hung_up(stranger))
    assert desk.server.connected == 0
    assert desk.ends() == {}


def test_an_agent_that_sends_garbage_counts_as_lost(desk: Desk) -> None:
    desk.agent(0).sendall(b"garbage\n")
    desk.until(lambda: not desk.server.running)
    assert desk.ends() == {0: None}


def test_a_stranger_that_says_nothing_blocks_nobody(desk: Desk) -> None:
    silent = [desk.connect() for _ in range(20)]
    silent[0].sendall(b'{"kind":')
    agent = desk.agent(0)
    agent.sendall(line("epoch 1", "stdout"))
    desk.until(lambda: desk.out.getvalue() == "[0] epoch 1\n", timeout_s=5)
    silent[1].close()
    agent.sendall(line("epoch 2", "stdout"))
    desk.until(lambda: desk.out.getvalue().endswith("[0] epoch 2\n"), timeout_s=5)
    assert desk.server.hosts() == {0: "a"}


def test_a_local_job_listens_on_this_host_alone(desk: Desk) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", desk.server.port), timeout=5)
    console = Console(io.StringIO(), io.StringIO(), ranks=1, with_host=False, chief_only=False)
    with contextlib.closing(AgentServer(1, console, local=False)) as everywhere:
        socket.create_connection(("127.0.0.2", everywhere.port), timeout=5).close()


def test_lines_and_ends_are_taken_in(desk: Desk) -> None:
    brief, agent = desk.connect(), desk.agent(1)
    brief.sendall(desk.hello() + line("a", "stdout") + line("b") + encode("end", code=0))
    desk.until(lambda: 0 in desk.ends())
    agent.sendall(encode("told", signal=15) + line("c") + encode("end", code=7))
    desk.until(lambda: not desk.server.running)
    assert (desk.out.getvalue(), desk.err.getvalue()) == ("[0] a\n", "[0] b\n[1] c\n")
    assert [(e.rank, e.host, e.code, e.stderr, e.was_signalled) for e in desk.server.ends] == [
        (0, "a", 0, ("b",), False),
        (1, "a", 7, ("c",), True),
    ]


def test_hidden_lines_are_neither_shown_nor_recorded() -> None:
    heard: list[tuple[int, str, str]] = []
    with contextlib.ExitStack() as stack:
        desk = Desk(stack, hides="noise".__eq__, heard=lambda *line: heard.append(line))
        agent = desk.agent(0)
        agent.sendall(line("noise") + line("words") + line("noise", "stdout"))
        agent.sendall(encode("end", code=1))
        desk.until(lambda: not desk.server.running)
        assert (desk.out.getvalue(), desk.err.getvalue()) == ("[0] noise\n", "[0] words\n")
        assert desk.server.ends[0].stderr == ("words",)
    assert heard == [(0, "stderr", "words"), (0, "stdout", "noise")]


def test_a_line_of_any_length_is_one_line(desk: Desk) -> None:
    text = "é" * MAX_LINE_LENGTH
    connection = desk.agent(0)
    data = line(text, "stdout")
    for at in range(0, len(data), WINDOW_BYTES):
        connection.sendall(data[at : at + WINDOW_BYTES])
        desk.server.step(0.0)
    desk.until(lambda: desk.out.getvalue() != "")
    assert desk.out.getvalue() == f"[0] {text}\n"


def test_agents_may_send_more_unless_they_are_held_up() -> None:
    with contextlib.ExitStack() as stack:
        full = True
        desk = Desk(stack, holds_up=lambda: full)
        agent = desk.agent(0)
        data = line("x" * WINDOW_BYTES, "stdout")
        agent.sendall(data)
        desk.until(lambda: desk.out.getvalue() != "")
        assert received(agent) == []
        full = False
        desk.server.step(0.01)
        [taken] = received(agent)
        assert taken == {"kind": "taken", "size": len(desk.hello()) + len(data)}
        agent.sendall(line("short"))
        desk.until(lambda: desk.err.getvalue() != "")
        assert received(agent) == [], "not for each message"


def test_a_lost_agent_is_an_end_without_a_code(desk: Desk) -> None:
    lost, ended, well = (desk.agent(rank) for rank in range(3))
    ended.sendall(encode("end", code=0))
    desk.until(lambda: 1 in desk.ends())
    ended.close()
    lost.sendall(line("last words"))
    lost.close()
    desk.until(lambda: desk.server.running == [2])
    assert desk.ends() == {1: 0, 0: None}
    assert desk.server.ends[1].stderr == ("last words",)
    well.sendall(line("well"))
    desk.until(lambda: desk.err.getvalue().endswith("[2] well\n"))


def test_stop_reaches_who_runs_and_dismiss_who_has_ended(desk: Desk) -> None:
    runs, ended, lost = (desk.agent(rank) for rank in range(3))
    ended.sendall(encode("end", code=0))
    lost.close()
    desk.until(lambda: desk.server.running == [0])
    desk.server.stop(2, 1.5)
    desk.server.dismiss()
    assert received(runs) == [{"kind": "stop", "signal": 2, "grace_s": 1.5}]
    assert received(ended) == [{"kind": "bye"}]
    runs.sendall(encode("end", code=130))
    desk.until(lambda: not desk.server.running)
    assert [end.was_signalled for end in desk.server.ends if end.rank == 0] == [True]


def test_who_comes_late_is_told_as_well(desk: Desk) -> None:
    desk.server.stop(10, 60.0)
    late = desk.agent(0)
    assert received(late) == [{"kind": "stop", "signal": 10, "grace_s": 60.0}]
    late.sendall(encode("end", code=75))
    desk.until(lambda: not desk.server.running)
    assert desk.server.ends[0].was_signalled


def test_an_agent_that_can_not_be_told_is_lost(desk: Desk) -> None:
    """Its host is gone: nothing more is heard, and what is sent comes back as an error."""
    agent = desk.agent(0)
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    agent.close()
    deadline = time.monotonic() + 10
    while desk.server.running and time.monotonic() < deadline:
        desk.server.stop(15, 1.0)
    assert desk.ends() == {0: None}
    desk.server.step(0.01)
    desk.server.dismiss()


def test_reports_are_taken_in_and_nonsense_is_not(desk: Desk) -> None:
    agent = desk.agent(1)
    agent.sendall(encode("report", step=4, phase="training"))
    desk.until(lambda: desk.server.reports.step == 4)
    agent.sendall(encode("report", step="5") + encode("report", pid=[1]) + line("well"))
    desk.until(lambda: desk.err.getvalue() == "[1] well\n")
    assert desk.server.reports.latest[1].step == 4


def test_why_a_program_failed_is_noted_with_its_end(desk: Desk) -> None:
    first, second, nonsense = (desk.agent(rank) for rank in range(3))
    failure = {"exception": "KeyError", "message": "'x'", "traceback": "", "time_s": 5.0}
    first.sendall(encode("failure", **failure) + line("well"))
    desk.until(lambda: desk.err.getvalue() == "[0] well\n")
    # It exits later, but failed before.
    second.sendall(encode("failure", **failure) + encode("end", code=1))
    desk.until(lambda: 1 in desk.ends())
    first.sendall(line("late") + encode("end", code=1))
    nonsense.sendall(encode("failure", exception=3) + encode("end", code=1))
    desk.until(lambda: not desk.server.running)
    told = {end.rank: end.record for end in desk.server.ends}
    record = FailureRecord(exception="KeyError", message="'x'", time_s=5.0)
    assert told == {0: record, 1: record, 2: None}
    assert min(desk.server.ends, key=lambda end: end.failed_at).rank == 0


def test_a_time_out_in_the_start_of_mpi_is_known_by_its_phase_and_line(desk: Desk) -> None:
    """MPI itself ends a process with exit code 1 too, as without Slurm's PMI."""
    waits, aborts, imports = (desk.agent(rank) for rank in range(3))
    timeout = line("Timeout (0:10:00)!")
    abort = line("*** An error occurred in MPI_Init_thread")
    starts, end = encode("report", phase="starting MPI"), encode("end", code=1)
    waits.sendall(starts + timeout + end)
    aborts.sendall(starts + abort + end)
    imports.sendall(encode("report", phase="") + timeout + end)
    desk.until(lambda: not desk.server.running)
    assert {end.rank: end.hung for end in desk.server.ends} == {0: True, 1: False, 2: False}


def test_a_look_at_all_that_run(desk: Desk) -> None:
    stopped, ended = desk.agent(0), desk.agent(1)
    ended.sendall(encode("end", code=0))
    desk.until(lambda: 1 in desk.ends())
    desk.server.look()
    assert (received(stopped), received(ended)) == ([{"kind": "look"}], [])
    stopped.sendall(encode("looked", stopped=True))
    desk.until(lambda: desk.server.stopped == {0: True})


def test_an_end_that_is_forgiven_is_no_failure(desk: Desk) -> None:
    dead, _ = desk.agent(0), desk.agent(1)
    dead.sendall(encode("end", code=137))
    desk.until(lambda: 0 in desk.ends())
    desk.server.drop_lost(desk.server.ends[0])
    assert (desk.ends(), desk.server.dropped, desk.server.running) == ({}, [0], [1])


LIMITED = """
import io, resource, sys
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.console import Console
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
console = Console(io.StringIO(), io.StringIO(), ranks=400, with_host=False, chief_only=False)
AgentServer(400, console, local=True).close()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("most", [1000, 300])
def test_each_rank_has_a_connection_or_the_limit_is_named(most: int) -> None:
    argv = [sys.executable, "-c", LIMITED, str(most)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if most == 1000:
        assert done.stdout == "(600, 1000)\n", done
    else:
        assert "400 ranks need 600 open files here" in done.stderr
        assert "300 are allowed (ulimit -Hn)" in done.stderr
