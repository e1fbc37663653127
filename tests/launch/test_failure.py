"""The outcome of an attempt, and explanations why ranks did not start."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hvdtrain.agent.rank_report import FailureRecord, RankReport
from hvdtrain.launch.failure import (
    Cause,
    JobRecord,
    Outcome,
    RankExit,
    classify,
    is_preempted,
)
from hvdtrain.launch.progress import JobProgress

KILLED = 128 + signal.SIGKILL
VALUE, PEER, TIMEOUT = (
    FailureRecord(exception=name)
    for name in ("ValueError", "PeerFailedError", "CollectiveTimeoutError")
)
PMIX = ("[b:00000] *** An error occurred in PMIx Event Notification", "[b:00000] *** Unknown error")
HOSTS = {0: "a", 1: "b"}


def one(rank: int, code: int | None, record: FailureRecord | None = None, **more: Any) -> RankExit:
    at = float(more.pop("at", rank))
    return RankExit(rank=rank, host=HOSTS[rank], code=code, record=record, failed_at=at, **more)


def signalled(rank: int, code: int | None) -> RankExit:
    return one(rank, code, was_signalled=True)


def started(*ranks: int) -> JobProgress:
    reports = JobProgress()
    for rank in ranks:
        reports.add(rank, RankReport(phase="started"), 0.0)
    return reports


def outcome_of(*ends: RankExit, **record: Any) -> Outcome:
    defaults = {"hosts": HOSTS, "seen": HOSTS, "started_at": 100.0, "ended_at": 130.0}
    return classify(JobRecord(**{"ends": ends, "reports": JobProgress(), **defaults, **record}))


def stop(number: int) -> dict[str, Any]:
    return {"received": [number]}


OUTCOMES: dict[str, tuple[list[RankExit], dict[str, Any], int, Cause]] = {
    "well": ([one(0, 0), one(1, 0)], {}, 0, "done"),
    "exception": ([one(1, 1, VALUE), one(0, 1, PEER)], {}, 1, "exception"),
    "killed": ([one(1, KILLED), one(0, 1, PEER)], {}, KILLED, "infrastructure"),
    "crashed": ([one(1, 139)], {}, 139, "infrastructure"),
    "lost": ([one(1, None), signalled(0, 143)], {}, KILLED, "infrastructure"),
    "timed-out": ([one(0, 1, TIMEOUT)], {}, 124, "infrastructure"),
    "hang": ([signalled(0, 143)], {"hang": "the job hangs"}, 124, "infrastructure"),
    "follower-only": ([one(0, 1, PEER)], {}, 1, "infrastructure"),
    "own-code": ([one(0, 3)], {}, 3, "own code"),
    "own-code-1": ([one(0, 1)], {"reports": started(0)}, 1, "own code"),
    "1-before-the-start": ([one(0, 1)], {"reports": started(1)}, 1, "exception"),
    "own-code-14": ([one(0, 14), signalled(1, 143)], {}, 14, "own code"),
    "killed-and-ended-by-mpi": ([one(0, 14), one(1, KILLED)], {}, KILLED, "infrastructure"),
    "lost-and-ended-by-mpi": ([one(0, 14), signalled(1, None)], {}, KILLED, "infrastructure"),
    "ended-by-mpi": ([one(0, 195, stderr=PMIX), signalled(1, 143)], {}, 195, "infrastructure"),
    "ended-by-mpi-silently": ([one(0, 14), one(1, 14)], {"starter": "srun"}, 14, "infrastructure"),
    "own-code-in-slurm": ([one(0, 3)], {"starter": "srun"}, 3, "own code"),
    "exception-and-ended-by-mpi": ([one(0, 14, stderr=PMIX), one(1, 1, VALUE)], {}, 1, "exception"),
    "exception-14": ([one(0, 14, VALUE), signalled(1, None)], {}, 14, "own code"),
    "255": ([one(0, 255)], {}, 255, "own code"),
    "missing": ([], {"seen": {0: "a"}}, 125, "infrastructure"),
    "missing-and-signalled": ([signalled(0, 143)], {"seen": {0: "a"}}, 125, "infrastructure"),
    "starter": ([one(0, 0), one(1, 0)], {"starter_code": 9}, 9, "own code"),
    "interrupted": ([signalled(0, 130)], stop(signal.SIGINT), 130, "ordered"),
    "too-late-to-be-cancelled": ([one(0, 0), one(1, 0)], stop(signal.SIGTERM), 0, "done"),
    "handles-sigterm": ([one(0, 0), signalled(1, 0)], stop(signal.SIGTERM), 143, "ordered"),
    "cancelled-at-its-start": (
        [one(0, 0)],
        {**stop(signal.SIGTERM), "seen": {0: "a"}},
        143,
        "ordered",
    ),
    "cancelled": ([signalled(0, 75)], stop(signal.SIGTERM), 143, "ordered"),
    "preempted": ([signalled(0, 75)], stop(signal.SIGUSR1), 75, "ordered"),
    "preempted-silently": ([signalled(0, 138)], stop(signal.SIGUSR1), 75, "ordered"),
    "ranks-preempted": ([one(0, 75), one(1, 75)], {}, 75, "preempted"),
    "one-rank-signalled": ([signalled(1, 75), one(0, 75)], {}, 75, "preempted"),
    "preempted-then-killed": ([one(0, 75), one(1, KILLED, at=5)], {}, 75, "preempted"),
    "killed-then-preempted": ([one(0, KILLED), one(1, 75, at=5)], {}, KILLED, "infrastructure"),
    "one-signalled-rank-dies-of-it": (
        [signalled(1, 138), one(0, 1, PEER, at=5)],
        {},
        1,
        "infrastructure",
    ),
}


@pytest.mark.parametrize(("ends", "record", "code", "cause"), OUTCOMES.values(), ids=OUTCOMES)
def test_code_and_cause(
    ends: list[RankExit], record: dict[str, Any], code: int, cause: Cause
) -> None:
    outcome = outcome_of(*ends, **record)
    assert (outcome.code, outcome.cause) == (code, cause)


def test_is_preempted() -> None:
    assert is_preempted([one(0, 0), one(1, 75)])
    assert not is_preempted([one(0, 0)])
    assert not is_preempted([one(0, KILLED), one(1, 75, at=5)])


def test_a_repeated_preemption_signal_is_not_a_failure() -> None:
    died = 128 + signal.SIGUSR1
    assert is_preempted([one(0, 75, at=5), one(1, died, at=4)])
    # Without a rank that exits with 75, it is unknown whether everything is saved.
    assert not is_preempted([one(0, died), one(1, died)])
    assert not is_preempted([one(0, 0), one(1, died)])


def reported(**state: int) -> JobProgress:
    reports = JobProgress()
    reports.add(0, RankReport(step=41), 110.0)
    reports.add(1, RankReport(**state), 120.0)
    return reports


MESSAGES: dict[str, tuple[list[RankExit], dict[str, Any], list[str]]] = {
    "success": ([one(0, 0), one(1, 0)], {}, []),
    "preempted": (
        [one(0, 75), one(1, 75)],
        {"reports": reported(saved=41)},
        ["preempted at step 41, checkpoint saved; start the job again to resume"],
    ),
    "preempted-without-a-checkpoint": (
        [one(0, 75)],
        {"reports": reported(saved=30)},
        ["preempted at step 41, newest checkpoint from step 30; start the job again to resume"],
    ),
    "preempted-without-reports": ([one(0, 75)], {}, ["preempted; start the job again to resume"]),
    "stopped-and-saved": (
        [signalled(0, 75)],
        {"reports": reported(saved=41), **stop(signal.SIGTERM)},
        [
            "the job was stopped by SIGTERM at step 41, checkpoint saved; start the job again to "
            "resume"
        ],
    ),
    "stopped": (
        [signalled(0, 143)],
        {"reports": reported(saved=41), **stop(signal.SIGTERM)},
        ["the job was stopped by SIGTERM"],
    ),
    "failed-while-saving": (
        [one(0, 3), signalled(1, 75)],
        stop(signal.SIGUSR1),
        [
            "rank 0 on a failed first: exit code 3",
            "the job was stopped by SIGUSR1; start the job again to resume",
        ],
    ),
}


@pytest.mark.parametrize(("ends", "record", "messages"), MESSAGES.values(), ids=MESSAGES)
def test_messages(ends: list[RankExit], record: dict[str, Any], messages: list[str]) -> None:
    assert list(outcome_of(*ends, **record).messages) == messages


def test_lost_work() -> None:
    outcome = outcome_of(one(1, KILLED), reports=reported(saved=30))
    assert (outcome.step, outcome.failed_after, outcome.saved) == (41, None, 30)
    assert outcome.lost_s == 10.0, "since the checkpoint was written"
    outcome = outcome_of(one(0, KILLED), reports=reported(resumed=30))
    assert (outcome.step, outcome.failed_after, outcome.saved) == (41, 41, 30)
    assert outcome.lost_s == 30.0, "since the attempt started"


def test_lost_hosts() -> None:
    assert outcome_of(one(1, None), signalled(0, 143)).lost_hosts == ("b",)
    refused = "ssh: connect to host b port 22: Connection refused"
    assert outcome_of(seen={}, starter_output=[refused]).lost_hosts == ("b",)
    assert outcome_of(seen={}, starter_output=["an unknown error"]).lost_hosts == ()


def test_a_missing_plugin_of_slurm_has_its_own_remedy() -> None:
    error = "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types"
    outcome = outcome_of(seen={}, starter="srun", starter_output=[error])
    _, remedy, output = outcome.messages
    assert outcome.cause == "setup"
    assert "no plug-in --mpi=pmix; set SLURM_MPI_TYPE" in remedy
    assert error in output


def test_repeated_output_of_mpirun_is_shown_once_and_cut() -> None:
    output = ["no route there"]
    for host in range(50):
        output += ["-" * 60, "A daemon failed.", f"  Remote host:   node{host}", "-" * 60]
    message = outcome_of(seen={}, starter_output=output).messages[-1]
    lines = [line.strip() for line in message.splitlines()[1:]]
    assert lines[:3] == ["no route there", "A daemon failed.", "Remote host:   node0"]
    assert lines[-1] == "... and 12 more lines"
    assert len(lines) == 41
