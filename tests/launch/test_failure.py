"""Among the ends of all ranks, the one that the others follow from; and what is said of it."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.collectives import exit_hooks
from hvdtrain.errors import CollectiveTimeoutError, PeerFailedError
from hvdtrain.launch.failure import RankExit, describe, describe_loss, exit_code, first_failure

TRACE = ("Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: 3")
PEER, VALUE, INTERRUPT, TIMEOUT = (
    FailureRecord(exception=name)
    for name in ("PeerFailedError", "ValueError", "KeyboardInterrupt", "CollectiveTimeoutError")
)


def end(
    rank: int, code: int | None = 1, record: FailureRecord | None = None, **more: Any
) -> RankExit:
    return RankExit(rank=rank, host="node1", code=code, record=record, **more)


LOST = None

# The ends in the order in which they arrive, and the rank that failed first.
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
    found = first_failure(ends)
    assert (found.rank if found else None) == rank


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


def test_the_traceback_is_the_records_and_else_the_last_lines_of_stderr() -> None:
    record = FailureRecord(exception="ValueError", traceback="\n".join(TRACE))
    printed = ("usage: train.py", "x" * 2000)
    described = describe(end(0, 1, record, stderr=printed)).splitlines()
    assert described[1:] == ["traceback:", *("  " + line for line in TRACE)]
    described = describe(end(0, 1, stderr=printed)).splitlines()
    assert described[1:] == ["last lines of stderr:", "  usage: train.py", "  " + "x" * 500]
    described = describe(end(0, 1, stderr=tuple(map(str, range(100))))).splitlines()
    assert described[2:] == [f"  {number}" for number in range(70, 100)]
    assert describe(end(0, 7)) == "rank 0 on node1 failed first: exit code 7"


def killed(**counts: int) -> RankExit:
    code = 128 + signal.SIGKILL
    return RankExit(rank=0, host="node1", code=code, kills=OomKills(**counts))


HOW: dict[str, tuple[RankExit, str]] = {
    "code": (end(0, 7), "exit code 7"),
    "signal": (end(0, 128 + signal.SIGTERM), "ended by signal 15 (SIGTERM)"),
    "out-of-memory": (
        killed(in_group=1, on_host=1, limit_bytes=96 << 20),
        "ended by signal 9 (SIGKILL): killed by the kernel for lack of memory (limit of its "
        "cgroup: 96 MiB)",
    ),
    "out-of-memory-of-the-host": (
        killed(in_group=2, on_host=3),
        "ended by signal 9 (SIGKILL): killed by the kernel for lack of memory (its cgroup shows "
        "no limit, so the host's may have run out)",
    ),
    "perhaps-out-of-memory": (
        killed(on_host=1),
        "ended by signal 9 (SIGKILL); the kernel killed a process on that host for lack of memory "
        "meanwhile, perhaps this one",
    ),
    "perhaps-a-child-in-another-group": (
        killed(in_group=0, on_host=1),
        "ended by signal 9 (SIGKILL); the kernel killed a process on that host for lack of memory "
        "meanwhile, perhaps this one",
    ),
    "killed-by-others": (
        killed(in_group=0, on_host=0, limit_bytes=96 << 20),
        "ended by signal 9 (SIGKILL); by a person or a program, not by the kernel for lack of "
        "memory",
    ),
    "killed-by-whom": (
        end(0, 128 + signal.SIGKILL),
        "ended by signal 9 (SIGKILL); the kernel does that when memory runs out, but its counts "
        "can't be read there (dmesg on the host may tell)",
    ),
    "no-such-signal": (end(0, 255), "exit code 255"),
    "timeout": (end(0, 1, TIMEOUT), "it waited too long for other ranks; exit code 1"),
    "mpi": (
        end(0, 195, stderr=("[b:0] *** An error occurred in PMIx Event Notification",)),
        "MPI ended it, as another rank or what started it was gone; exit code 195",
    ),
    "lost": (
        end(0, LOST),
        "the connection to it was lost; its host died, or its processes were killed (as those of "
        "a container may be that runs out of memory)",
    ),
}


@pytest.mark.parametrize(("first", "how"), HOW.values(), ids=HOW)
def test_how_it_ended_is_told(first: RankExit, how: str) -> None:
    told = describe(first).splitlines()[0]
    assert told == f"rank 0 on node1 failed first: {how}"


def test_who_lacks_memory_is_told_where_to_get_it() -> None:
    for counts in ({"in_group": 1}, {"on_host": 1}):
        advice = describe(killed(**counts)).splitlines()[1]
        assert "smaller batch" in advice
        assert "--mem" in advice
    for first in (killed(in_group=0, on_host=0), killed(), end(0, 137)):
        assert len(describe(first).splitlines()) == 1


def test_a_killed_child_is_told_of_as_well() -> None:
    kills = OomKills(in_group=1, on_host=1, limit_bytes=96 << 20)
    told = describe(end(0, 1, kills=kills, stderr=TRACE)).splitlines()
    assert told[0] == "rank 0 on node1 failed first: exit code 1"
    assert told[1] == (
        "before, the kernel killed a process in its cgroup for lack of memory (limit of its "
        "cgroup: 96 MiB)"
    )
    assert "smaller batch" in told[2]
    assert told[3] == "last lines of stderr:"
    # Elsewhere on the host is too far off for a program that says itself what went wrong.
    other = RankExit(rank=0, host="node1", code=1, kills=OomKills(in_group=0, on_host=1))
    assert describe(other) == "rank 0 on node1 failed first: exit code 1"


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


KILLED = 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("one", "lost"),
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
def test_is_loss(one: RankExit, lost: bool) -> None:
    assert one.is_loss is lost


def test_describe_loss() -> None:
    told = describe_loss(end(2, KILLED), 41, 3, enough=True)
    assert told == "rank 2 on node1 was lost (SIGKILL) after step 41; 3 ranks go on"
    told = describe_loss(end(2, KILLED), None, 1, enough=True)
    assert told == "rank 2 on node1 was lost (SIGKILL); 1 rank goes on"
    memory = RankExit(rank=2, host="node1", code=KILLED, kills=OomKills(in_group=1))
    told = describe_loss(memory, 41, 3, enough=True)
    assert told.startswith("rank 2 on node1 was lost (SIGKILL, for lack of memory) after step 41")
    told = describe_loss(end(2, KILLED), 41, 1, enough=False)
    assert told == "rank 2 on node1 was lost (SIGKILL) after step 41; 1 rank left: too few"
