"""The exits of ranks, and the first of several failures."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.collectives import exit_hooks
from hvdtrain.errors import CollectiveTimeoutError, PeerFailedError
from hvdtrain.launch.failure import (
    RankExit,
    describe_failure,
    describe_loss,
    exit_code,
    first_failure,
)

TRACE = ("Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: 3")
PEER, VALUE, INTERRUPT, TIMEOUT = (
    FailureRecord(exception=name)
    for name in ("PeerFailedError", "ValueError", "KeyboardInterrupt", "CollectiveTimeoutError")
)
KILLED = 128 + signal.SIGKILL
LOST = None


def end(
    rank: int, code: int | None = 1, record: FailureRecord | None = None, **more: Any
) -> RankExit:
    return RankExit(rank=rank, host="node1", code=code, record=record, **more)


# Ends in order of arrival, and the rank that failed first.
FIRST: dict[str, tuple[list[RankExit], int | None]] = {
    "nobody": ([], None),
    "all-well": ([end(0, 0), end(1, 0)], None),
    "well-with-a-record": ([end(0, 0, VALUE)], None),
    "one": ([end(0, 0), end(1, 7)], 1),
    "the-first-of-two": ([end(1, 7), end(0, 1, VALUE)], 1),
    "echo-comes-before": ([end(0, 1, PEER), end(1, 1, PEER), end(2, 1, VALUE)], 2),
    "echo-before-silent-exit": ([end(0, 1, PEER), end(2, 3)], 2),
    "echo-before-kill": ([end(0, 1, PEER), end(2, 128 + signal.SIGKILL)], 2),
    "echo-before-lost-host": ([end(0, 1, PEER), end(2, LOST)], 2),
    "only-echoes": ([end(1, 1, PEER), end(0, 1, PEER)], 1),
    "signalled-before": ([end(0, 143, was_signalled=True), end(2, 1, VALUE)], 2),
    "signalled-and-interrupted": ([end(0, 1, INTERRUPT, was_signalled=True), end(2, 1, VALUE)], 2),
    "both-signalled": (
        [end(0, 1, INTERRUPT, was_signalled=True), end(2, 1, VALUE, was_signalled=True)],
        2,
    ),
    "signalled-and-echo": ([end(0, 1, PEER, was_signalled=True), end(2, 5)], 2),
    "signalled-after-its-record": ([end(0, 1, PEER), end(2, 1, VALUE, was_signalled=True)], 2),
    "signalled-after-its-crash": ([end(0, 1, PEER), end(2, 139, was_signalled=True)], 2),
    "unsignalled-beats-its-record": ([end(0, 1, VALUE, was_signalled=True), end(2, 1, VALUE)], 2),
    "all-signalled": ([end(1, 143, was_signalled=True), end(0, 143, was_signalled=True)], 1),
    "lost-before-a-failure": ([end(0, LOST), end(2, 1, VALUE)], 2),
    "lost-before-an-echo": ([end(2, LOST), end(0, 1, PEER)], 2),
    "lost-before-signalled": ([end(2, LOST), end(0, 143, was_signalled=True)], 2),
    "all-lost": ([end(1, LOST), end(0, LOST)], 1),
}


@pytest.mark.parametrize(("ends", "rank"), FIRST.values(), ids=FIRST)
def test_first_failure(ends: list[RankExit], rank: int | None) -> None:
    first = first_failure(ends)
    assert (first.rank if first else None) == rank


CODES: dict[str, tuple[RankExit | None, int]] = {
    "no-failure": (None, 0),
    "own-code": (end(0, 7), 7),
    "255": (end(0, 255), 255),
    "signal": (end(0, 128 + signal.SIGSEGV), 139),
    "lost": (end(0, LOST), 137),
    "timeout": (end(0, 1, TIMEOUT), 124),
    "exception": (end(0, 1, VALUE), 1),
}


@pytest.mark.parametrize(("first", "code"), CODES.values(), ids=CODES)
def test_exit_code(first: RankExit | None, code: int) -> None:
    assert exit_code(first) == code


def test_the_failure_shows_the_recorded_traceback_or_the_last_lines_of_stderr() -> None:
    record = FailureRecord(exception="ValueError", traceback="\n".join(TRACE))
    printed = ("usage: train.py", "x" * 2000)
    lines = describe_failure(end(0, 1, record, stderr=printed)).splitlines()
    assert lines[1:] == ["traceback:", *("  " + line for line in TRACE)]
    lines = describe_failure(end(0, 1, stderr=printed)).splitlines()
    assert lines[1:] == ["last lines of stderr:", "  usage: train.py", "  " + "x" * 500]
    lines = describe_failure(end(0, 1, stderr=tuple(map(str, range(100))))).splitlines()
    assert lines[2:] == [f"  {number}" for number in range(70, 100)]
    assert describe_failure(end(0, 7)) == "rank 0 on node1 failed first: exit code 7"


def killed(**counts: int) -> RankExit:
    return RankExit(rank=0, host="node1", code=KILLED, kills=OomKills(**counts))


POSSIBLE_OOM = (
    "killed by signal 9 (SIGKILL); the host ran out of memory and its kernel killed "
    "a process, possibly this one"
)
DESCRIPTIONS: dict[str, tuple[RankExit, str]] = {
    "signal": (end(0, 128 + signal.SIGTERM), "killed by signal 15 (SIGTERM)"),
    "out-of-memory": (
        killed(in_group=1, on_host=1, limit_bytes=96 << 20),
        "killed by signal 9 (SIGKILL): out of memory (cgroup limit 96 MiB)",
    ),
    "out-of-memory-without-a-limit": (
        killed(in_group=2, on_host=3),
        "killed by signal 9 (SIGKILL): out of memory (no cgroup limit was found, so perhaps "
        "the whole host)",
    ),
    "perhaps-out-of-memory": (killed(on_host=1), POSSIBLE_OOM),
    "perhaps-a-child-in-another-group": (killed(in_group=0, on_host=1), POSSIBLE_OOM),
    "killed-by-a-user": (
        killed(in_group=0, on_host=0, limit_bytes=96 << 20),
        "killed by signal 9 (SIGKILL); the kernel reports no out-of-memory kill, so a user or a "
        "program sent it",
    ),
    "unknown-killer": (
        end(0, KILLED),
        "killed by signal 9 (SIGKILL); possibly out of memory: the kernel's counters can't be read "
        "(see dmesg there)",
    ),
    "no-such-signal": (end(0, 255), "exit code 255"),
    "timeout": (end(0, 1, TIMEOUT), "timed out waiting for other ranks; exit code 1"),
    "mpi": (
        end(0, 195, stderr=("[b:0] *** An error occurred in PMIx Event Notification",)),
        "MPI ended it after losing another rank or its parent; exit code 195",
    ),
    "lost": (
        end(0, LOST),
        "the connection to its agent was lost; its host died, or its processes were killed, for "
        "example by a container that ran out of memory",
    ),
}


@pytest.mark.parametrize(("first", "text"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_describe_failure(first: RankExit, text: str) -> None:
    assert describe_failure(first).splitlines()[0] == f"rank 0 on node1 failed first: {text}"


def test_advice_follows_an_out_of_memory_kill() -> None:
    for counts in ({"in_group": 1}, {"on_host": 1}):
        advice = describe_failure(killed(**counts)).splitlines()[1]
        assert "batch size" in advice
        assert "--mem" in advice
    for first in (killed(in_group=0, on_host=0), killed(), end(0, KILLED)):
        assert len(describe_failure(first).splitlines()) == 1


def test_an_out_of_memory_kill_of_a_child_is_reported() -> None:
    kills = OomKills(in_group=1, on_host=1, limit_bytes=96 << 20)
    lines = describe_failure(end(0, 1, kills=kills, stderr=TRACE)).splitlines()
    assert lines[:2] == [
        "rank 0 on node1 failed first: exit code 1",
        "earlier, the kernel killed another process in its cgroup: out of memory (cgroup limit 96 "
        "MiB)",
    ]
    assert "batch size" in lines[2]
    assert lines[3] == "last lines of stderr:"
    # A kill elsewhere on the host is unlikely to explain an exit code.
    other = end(0, 1, kills=OomKills(in_group=0, on_host=1))
    assert describe_failure(other) == "rank 0 on node1 failed first: exit code 1"


@pytest.mark.parametrize("error", [PeerFailedError("rank 2 failed"), CollectiveTimeoutError("5 s")])
def test_the_record_names_the_error_that_tensorflow_wrapped(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(
        closed=False, member=0, numbers=range(4), last_error=error, fail=lambda reason: None
    )
    monkeypatch.setattr(exit_hooks, "_current", engine)
    monkeypatch.setattr(exit_hooks, "FOLLOWER_PAUSE_S", 0.0)
    monkeypatch.setattr(exit_hooks, "_end_within", lambda seconds: None)
    wrapped = RuntimeError(f"2 root error(s) found: {error}")
    records: list[FailureRecord] = []

    def tell(cause: BaseException, error: BaseException) -> None:
        assert error is wrapped
        records.append(FailureRecord(exception=type(cause).__name__))

    exit_hooks._on_exception(sys.__excepthook__, tell, RuntimeError, wrapped, None)
    recorded = end(0, 1, records[0])
    follows = isinstance(error, PeerFailedError)
    assert first_failure([recorded, end(1, 7)]) == (end(1, 7) if follows else recorded)
    assert exit_code(recorded) == (1 if follows else 124)


@pytest.mark.parametrize(
    ("rank_exit", "is_loss"),
    [
        (end(2, KILLED), True),
        (end(2, 128 + signal.SIGSEGV), True),
        (end(2, 1), False),
        (end(2, 75), False),
        (end(2, 255), False),
        (end(2, 0), False),
        (end(2, None), False),
        (end(2, KILLED, was_signalled=True), False),
    ],
)
def test_is_loss(rank_exit: RankExit, is_loss: bool) -> None:
    assert rank_exit.is_loss is is_loss


def test_describe_loss() -> None:
    lost = end(2, KILLED)
    assert describe_loss(lost, 41, 3, 1) == (
        "rank 2 on node1 was lost (SIGKILL) after step 41; 3 ranks continue"
    )
    assert describe_loss(lost, None, 1, 1) == (
        "rank 2 on node1 was lost (SIGKILL); 1 rank continues"
    )
    out_of_memory = end(2, KILLED, kills=OomKills(in_group=1))
    assert describe_loss(out_of_memory, 41, 1, 2) == (
        "rank 2 on node1 was lost (SIGKILL, out of memory) after step 41; 1 rank left, fewer than "
        "--min-np 2"
    )
