"""The first failure of a job, and its outcome."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.agent.rank_report import FailureRecord, OomKills, RankReport
from hvdtrain.collectives import exit_hooks
from hvdtrain.errors import CollectiveTimeoutError, PeerFailedError
from hvdtrain.launch.failure import (
    Cause,
    JobRecord,
    Outcome,
    RankExit,
    classify,
    describe,
    describe_loss,
    exit_code,
    first_failure,
    preempted,
)
from hvdtrain.launch.progress import JobProgress

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


VALUE, PEER, TIMEOUT = (
    FailureRecord(exception=name)
    for name in ("ValueError", "PeerFailedError", "CollectiveTimeoutError")
)
PMIX = ("[b:00000] *** An error occurred in PMIx Event Notification", "[b:00000] *** Unknown error")
HOSTS = {0: "a", 1: "b"}


def one(rank: int, code: int | None, record: FailureRecord | None = None, **more: Any) -> RankExit:
    at = float(more.pop("at", rank))
    return RankExit(rank=rank, host=HOSTS[rank], code=code, record=record, failed_at=at, **more)


def started(*ranks: int) -> JobProgress:
    reports = JobProgress()
    for rank in ranks:
        reports.note(rank, RankReport(phase="started"), 0.0)
    return reports


def ended(*ends: RankExit, reports: JobProgress | None = None, **seen: Any) -> Outcome:
    return classify(
        JobRecord(
            **{
                "hosts": HOSTS,
                "seen": HOSTS,
                "ends": ends,
                "reports": reports or JobProgress(),
                "started_at": 100.0,
                "ended_at": 130.0,
                **seen,
            }
        )
    )


def told(number: int) -> dict[str, Any]:
    return {"received": [number]}


ENDED: dict[str, tuple[list[RankExit], dict[str, Any], int, Cause]] = {
    "well": ([one(0, 0), one(1, 0)], {}, 0, "done"),
    "exception": ([one(1, 1, VALUE), one(0, 1, PEER)], {}, 1, "exception"),
    "killed": ([one(1, KILLED), one(0, 1, PEER)], {}, KILLED, "infrastructure"),
    "crashed": ([one(1, 139)], {}, 139, "infrastructure"),
    "lost": (
        [one(1, None), one(0, 143, was_signalled=True)],
        {},
        KILLED,
        "infrastructure",
    ),
    "waited-in-vain": ([one(0, 1, TIMEOUT)], {}, 124, "infrastructure"),
    "hang": (
        [one(0, 143, was_signalled=True)],
        {"hang": "the job hangs"},
        124,
        "infrastructure",
    ),
    "only-an-echo": ([one(0, 1, PEER)], {}, 1, "infrastructure"),
    "own-code": ([one(0, 3)], {}, 3, "own code"),
    "own-code-1": ([one(0, 1)], {"reports": started(0)}, 1, "own code"),
    "1-before-the-start": ([one(0, 1)], {"reports": started(1)}, 1, "exception"),
    "own-code-14": ([one(0, 14), one(1, 143, was_signalled=True)], {}, 14, "own code"),
    "killed-and-ended-by-mpi": (
        [one(0, 14), one(1, KILLED)],
        {},
        KILLED,
        "infrastructure",
    ),
    "lost-and-ended-by-mpi": (
        [one(0, 14), one(1, None, was_signalled=True)],
        {},
        KILLED,
        "infrastructure",
    ),
    "ended-by-mpi": (
        [one(0, 195, stderr=PMIX), one(1, 143, was_signalled=True)],
        {},
        195,
        "infrastructure",
    ),
    "ended-by-mpi-without-a-word": (
        [one(0, 14), one(1, 14)],
        {"starter": "/usr/bin/srun"},
        14,
        "infrastructure",
    ),
    "own-code-in-slurm": ([one(0, 3)], {"starter": "/usr/bin/srun"}, 3, "own code"),
    "exception-and-ended-by-mpi": (
        [one(0, 14, stderr=PMIX), one(1, 1, VALUE)],
        {},
        1,
        "exception",
    ),
    "exception-14": (
        [one(0, 14, VALUE), one(1, None, was_signalled=True)],
        {},
        14,
        "own code",
    ),
    "255": ([one(0, 255)], {}, 255, "own code"),
    "missing": ([], {"seen": {0: "a"}}, 125, "infrastructure"),
    "missing-and-told-to-end": (
        [one(0, 143, was_signalled=True)],
        {"seen": {0: "a"}},
        125,
        "infrastructure",
    ),
    "starter": ([one(0, 0), one(1, 0)], {"starter_code": 9}, 9, "own code"),
    "interrupted": ([one(0, 130, was_signalled=True)], told(signal.SIGINT), 130, "ordered"),
    "too-late-to-be-cancelled": (
        [one(0, 0), one(1, 0)],
        told(signal.SIGTERM),
        0,
        "done",
    ),
    "handles-its-end": (
        [one(0, 0), one(1, 0, was_signalled=True)],
        told(signal.SIGTERM),
        143,
        "ordered",
    ),
    "cancelled-at-its-start": (
        [one(0, 0)],
        {**told(signal.SIGTERM), "seen": {0: "a"}},
        143,
        "ordered",
    ),
    "cancelled": ([one(0, 75, was_signalled=True)], told(signal.SIGTERM), 143, "ordered"),
    "preempted": ([one(0, 75, was_signalled=True)], told(signal.SIGUSR1), 75, "ordered"),
    "preempted-without-a-word": (
        [one(0, 138, was_signalled=True)],
        told(signal.SIGUSR1),
        75,
        "ordered",
    ),
    "ranks-preempted": ([one(0, 75), one(1, 75)], {}, 75, "preempted"),
    "one-rank-told": (
        [one(1, 75, was_signalled=True), one(0, 75)],
        {},
        75,
        "preempted",
    ),
    "preempted-then-killed": ([one(0, 75), one(1, KILLED, at=5)], {}, 75, "preempted"),
    "killed-then-preempted": (
        [one(0, KILLED), one(1, 75, at=5)],
        {},
        KILLED,
        "infrastructure",
    ),
    "one-rank-told-dies-of-it": (
        [one(1, 138, was_signalled=True), one(0, 1, PEER, at=5)],
        {},
        1,
        "infrastructure",
    ),
}


@pytest.mark.parametrize(("ends", "seen", "code", "cause"), ENDED.values(), ids=ENDED)
def test_code_and_cause(
    ends: list[RankExit], seen: dict[str, Any], code: int, cause: Cause
) -> None:
    outcome = ended(*ends, **seen)
    assert (outcome.code, outcome.cause) == (code, cause)


def test_preempted() -> None:
    assert preempted([one(0, 0), one(1, 75)])
    assert not preempted([one(0, 0)])
    assert not preempted([one(0, KILLED), one(1, 75, at=5)])


def test_a_signal_that_comes_once_more_to_ranks_that_leave_is_no_failure() -> None:
    died = 128 + signal.SIGUSR1
    assert preempted([one(0, 75, at=5), one(1, died, at=4)])
    # Without a rank that has left in order there is nobody to know that all is saved.
    assert not preempted([one(0, died), one(1, died)])
    assert not preempted([one(0, 0), one(1, died)])


def reported(**state: int) -> JobProgress:
    reports = JobProgress()
    reports.note(0, RankReport(step=41), 110.0)
    reports.note(1, RankReport(**state), 120.0)
    return reports


WORDS: dict[str, tuple[list[RankExit], dict[str, Any], list[str]]] = {
    "well": ([one(0, 0), one(1, 0)], {}, []),
    "preempted": (
        [one(0, 75), one(1, 75)],
        {"reports": reported(saved=41)},
        ["preempted at step 41, checkpoint saved; start it again to go on"],
    ),
    "preempted-without-a-checkpoint": (
        [one(0, 75)],
        {"reports": reported(saved=30)},
        ["preempted at step 41, newest checkpoint of step 30; start it again to go on"],
    ),
    "preempted-without-reports": ([one(0, 75)], {}, ["preempted; start it again to go on"]),
    "ended-and-saved": (
        [one(0, 75, was_signalled=True)],
        {"reports": reported(saved=41), **told(signal.SIGTERM)},
        ["the job was ended by SIGTERM at step 41, checkpoint saved; start it again to go on"],
    ),
    "ended": (
        [one(0, 143, was_signalled=True)],
        {"reports": reported(saved=41), **told(signal.SIGTERM)},
        ["the job was ended by SIGTERM"],
    ),
    "failed-while-saving": (
        [one(0, 3), one(1, 75, was_signalled=True)],
        told(signal.SIGUSR1),
        [
            "rank 0 on a failed first: exit code 3",
            "the job was ended by SIGUSR1; start it again to go on",
        ],
    ),
}


@pytest.mark.parametrize(("ends", "seen", "words"), WORDS.values(), ids=WORDS)
def test_words(ends: list[RankExit], seen: dict[str, Any], words: list[str]) -> None:
    assert list(ended(*ends, **seen).words) == words


def test_what_was_lost() -> None:
    outcome = ended(one(1, KILLED), reports=reported(saved=30))
    assert (outcome.step, outcome.failed_after, outcome.saved) == (41, None, 30)
    assert outcome.lost_s == 10.0, "since the checkpoint was written"
    outcome = ended(one(0, KILLED), reports=reported(resumed=30))
    assert (outcome.step, outcome.failed_after, outcome.saved) == (41, 41, 30)
    assert outcome.lost_s == 30.0, "since the attempt began"


def test_hosts_that_were_lost_or_did_not_start() -> None:
    assert ended(one(1, None), one(0, 143, was_signalled=True)).lost_hosts == ("b",)
    refused = "ssh: connect to host b port 22: Connection refused"
    assert ended(seen={}, words=[refused]).lost_hosts == ("b",)
    # Who is to blame has to be found out.
    assert ended(seen={}, words=["nothing that tells"]).lost_hosts == ()


def test_what_mpirun_says_of_each_host_is_shown_once() -> None:
    said = [
        ["-" * 60, "A daemon failed to report back.", f"  Remote host:   node{host}", "-" * 60]
        for host in range(50)
    ]
    words = [line for block in said for line in block]
    shown = ended(seen={}, words=["no way there", *words]).words[-1].splitlines()[1:]
    lines = [line.strip() for line in shown]
    assert lines[:3] == ["no way there", "A daemon failed to report back.", "Remote host:   node0"]
    assert lines[-1] == "... and 12 lines more"
    assert len(lines) == 41
