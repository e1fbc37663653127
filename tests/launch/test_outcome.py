"""How a job ended: the code, the cause, and the words."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hvdtrain.agent.rank_report import FailureRecord, RankReport
from hvdtrain.launch.failure import RankExit
from hvdtrain.launch.job_progress import JobProgress
from hvdtrain.launch.outcome import Cause, JobRecord, Outcome, classify, preempted

VALUE, PEER, TIMEOUT = (
    FailureRecord(exception=name)
    for name in ("ValueError", "PeerFailedError", "CollectiveTimeoutError")
)
PMIX = ("[b:00000] *** An error occurred in PMIx Event Notification", "[b:00000] *** Unknown error")
HOSTS = {0: "a", 1: "b"}


def end(rank: int, code: int | None, record: FailureRecord | None = None, **more: Any) -> RankExit:
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


KILLED = 128 + signal.SIGKILL
ENDED: dict[str, tuple[list[RankExit], dict[str, Any], int, Cause]] = {
    "well": ([end(0, 0), end(1, 0)], {}, 0, "done"),
    "exception": ([end(1, 1, VALUE), end(0, 1, PEER)], {}, 1, "exception"),
    "killed": ([end(1, KILLED), end(0, 1, PEER)], {}, KILLED, "infrastructure"),
    "crashed": ([end(1, 139)], {}, 139, "infrastructure"),
    "lost": ([end(1, None), end(0, 143, was_signalled=True)], {}, KILLED, "infrastructure"),
    "waited-in-vain": ([end(0, 1, TIMEOUT)], {}, 124, "infrastructure"),
    "hang": ([end(0, 143, was_signalled=True)], {"hang": "the job hangs"}, 124, "infrastructure"),
    "only-an-echo": ([end(0, 1, PEER)], {}, 1, "infrastructure"),
    "own-code": ([end(0, 3)], {}, 3, "own code"),
    "own-code-1": ([end(0, 1)], {"reports": started(0)}, 1, "own code"),
    "1-before-the-start": ([end(0, 1)], {"reports": started(1)}, 1, "exception"),
    "own-code-14": ([end(0, 14), end(1, 143, was_signalled=True)], {}, 14, "own code"),
    "killed-and-ended-by-mpi": ([end(0, 14), end(1, KILLED)], {}, KILLED, "infrastructure"),
    "lost-and-ended-by-mpi": (
        [end(0, 14), end(1, None, was_signalled=True)],
        {},
        KILLED,
        "infrastructure",
    ),
    "ended-by-mpi": (
        [end(0, 195, stderr=PMIX), end(1, 143, was_signalled=True)],
        {},
        195,
        "infrastructure",
    ),
    "ended-by-mpi-without-a-word": (
        [end(0, 14), end(1, 14)],
        {"starter": "/usr/bin/srun"},
        14,
        "infrastructure",
    ),
    "own-code-in-slurm": ([end(0, 3)], {"starter": "/usr/bin/srun"}, 3, "own code"),
    "exception-and-ended-by-mpi": ([end(0, 14, stderr=PMIX), end(1, 1, VALUE)], {}, 1, "exception"),
    "exception-14": ([end(0, 14, VALUE), end(1, None, was_signalled=True)], {}, 14, "own code"),
    "255": ([end(0, 255)], {}, 255, "own code"),
    "missing": ([], {"seen": {0: "a"}}, 125, "infrastructure"),
    "missing-and-told-to-end": (
        [end(0, 143, was_signalled=True)],
        {"seen": {0: "a"}},
        125,
        "infrastructure",
    ),
    "starter": ([end(0, 0), end(1, 0)], {"starter_code": 9}, 9, "own code"),
    "interrupted": ([end(0, 130, was_signalled=True)], told(signal.SIGINT), 130, "ordered"),
    "too-late-to-be-cancelled": ([end(0, 0), end(1, 0)], told(signal.SIGTERM), 0, "done"),
    "handles-its-end": (
        [end(0, 0), end(1, 0, was_signalled=True)],
        told(signal.SIGTERM),
        143,
        "ordered",
    ),
    "cancelled-at-its-start": (
        [end(0, 0)],
        {**told(signal.SIGTERM), "seen": {0: "a"}},
        143,
        "ordered",
    ),
    "cancelled": ([end(0, 75, was_signalled=True)], told(signal.SIGTERM), 143, "ordered"),
    "preempted": ([end(0, 75, was_signalled=True)], told(signal.SIGUSR1), 75, "ordered"),
    "preempted-without-a-word": (
        [end(0, 138, was_signalled=True)],
        told(signal.SIGUSR1),
        75,
        "ordered",
    ),
    "ranks-preempted": ([end(0, 75), end(1, 75)], {}, 75, "preempted"),
    "one-rank-told": ([end(1, 75, was_signalled=True), end(0, 75)], {}, 75, "preempted"),
    "preempted-then-killed": ([end(0, 75), end(1, KILLED, at=5)], {}, 75, "preempted"),
    "killed-then-preempted": ([end(0, KILLED), end(1, 75, at=5)], {}, KILLED, "infrastructure"),
    "one-rank-told-dies-of-it": (
        [end(1, 138, was_signalled=True), end(0, 1, PEER, at=5)],
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
    assert preempted([end(0, 0), end(1, 75)])
    assert not preempted([end(0, 0)])
    assert not preempted([end(0, KILLED), end(1, 75, at=5)])


def test_a_signal_that_comes_once_more_to_ranks_that_leave_is_no_failure() -> None:
    died = 128 + signal.SIGUSR1
    assert preempted([end(0, 75, at=5), end(1, died, at=4)])
    # Without a rank that has left in order there is nobody to know that all is saved.
    assert not preempted([end(0, died), end(1, died)])
    assert not preempted([end(0, 0), end(1, died)])


def reported(**state: int) -> JobProgress:
    reports = JobProgress()
    reports.note(0, RankReport(step=41), 110.0)
    reports.note(1, RankReport(**state), 120.0)
    return reports


WORDS: dict[str, tuple[list[RankExit], dict[str, Any], list[str]]] = {
    "well": ([end(0, 0), end(1, 0)], {}, []),
    "preempted": (
        [end(0, 75), end(1, 75)],
        {"reports": reported(saved=41)},
        ["preempted at step 41, checkpoint saved; start it again to go on"],
    ),
    "preempted-without-a-checkpoint": (
        [end(0, 75)],
        {"reports": reported(saved=30)},
        ["preempted at step 41, newest checkpoint of step 30; start it again to go on"],
    ),
    "preempted-without-reports": ([end(0, 75)], {}, ["preempted; start it again to go on"]),
    "ended-and-saved": (
        [end(0, 75, was_signalled=True)],
        {"reports": reported(saved=41), **told(signal.SIGTERM)},
        ["the job was ended by SIGTERM at step 41, checkpoint saved; start it again to go on"],
    ),
    "ended": (
        [end(0, 143, was_signalled=True)],
        {"reports": reported(saved=41), **told(signal.SIGTERM)},
        ["the job was ended by SIGTERM"],
    ),
    "failed-while-saving": (
        [end(0, 3), end(1, 75, was_signalled=True)],
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
    outcome = ended(end(1, KILLED), reports=reported(saved=30))
    assert (outcome.step, outcome.failed_after, outcome.saved) == (41, None, 30)
    assert outcome.lost_s == 10.0, "since the checkpoint was written"
    outcome = ended(end(0, KILLED), reports=reported(resumed=30))
    assert (outcome.step, outcome.failed_after, outcome.saved) == (41, 41, 30)
    assert outcome.lost_s == 30.0, "since the attempt began"


def test_hosts_that_were_lost_or_did_not_start() -> None:
    assert ended(end(1, None), end(0, 143, was_signalled=True)).lost_hosts == ("b",)
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
