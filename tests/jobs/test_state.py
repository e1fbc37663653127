from __future__ import annotations

import json

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.process_identity import ProcessIdentity
from hvdtrain.jobs.state import GOES_ON, GONE, NO_ANSWER, JobState, state_from_json, status_of

LAUNCHER = ProcessIdentity(host="a", pid=7, started_ticks=8, boot_id="b")
RUNS = JobState(phase="running", launcher=LAUNCHER, hosts={"a": 2}, attempt=1)


def test_a_state_comes_back_as_it_was() -> None:
    assert state_from_json(json.loads(json.dumps(RUNS.to_json()))) == RUNS
    assert state_from_json({"phase": "queued", "colour": 1}) == JobState(phase="queued")


BROKEN = {
    "nothing": {},
    "phase": {"phase": "dancing"},
    "launcher": {"phase": "running", "launcher": {"pid": 1}},
    "no-launcher": {"phase": "running", "launcher": 7},
    "hosts": {"phase": "running", "hosts": ["a"]},
    "step": {"phase": "running", "step": "3"},
    "ranks": {"phase": "running", "ranks": None},
    "since": {"phase": "ended", "since_s": "yesterday"},
    "verdict": {"phase": "ended", "verdict": ["killed"]},
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_state_is_refused(content) -> None:
    with pytest.raises(JobError):
        state_from_json(content)


def _ended(code: int, cause: str) -> JobState:
    return JobState(phase="ended", launcher=LAUNCHER, code=code, cause=cause)


# The state, whether its launcher lives, seconds since it was heard of: what is true.
TRUTH = {
    "unreadable": (None, None, 0, "unknown"),
    "runs": (RUNS, True, 0, "running"),
    "runs-on-a-slow-disk": (RUNS, True, 1000, "running"),
    "killed": (RUNS, False, 0, "lost"),
    "killed-in-the-queue": (JobState(phase="queued", launcher=LAUNCHER), False, 0, "lost"),
    "elsewhere": (RUNS, None, 30, "running"),
    "elsewhere-and-quiet": (RUNS, None, 61, "silent"),
    "submitted": (JobState(phase="queued"), None, 1, "queued"),
    "never-taken-up": (JobState(phase="queued"), None, 61, "lost"),
    "done": (_ended(0, "done"), False, 1000, "done"),
    "ended-well-after-a-signal": (_ended(0, "ordered"), False, 0, "done"),
    "failed": (_ended(1, "exception"), False, 0, "failed"),
    "stopped": (_ended(143, "ordered"), False, 0, "stopped"),
    "preempted": (_ended(75, "preempted"), False, 0, "preempted"),
    "not-started": (_ended(125, "infrastructure"), None, 0, "failed"),
}


# The state, seconds since its launcher, on another host, was heard of, what Slurm says.
QUEUED = JobState(phase="queued")
OF_SLURM = {
    "waits": (QUEUED, 1000, "PENDING", "queued"),
    "begins": (QUEUED, 1, "RUNNING", "queued"),
    "no-controller": (QUEUED, 1, NO_ANSWER, "unknown"),
    "cancelled": (QUEUED, 1, "CANCELLED", "stopped"),
    "failed-before-a-word": (QUEUED, 1, "NODE_FAIL", "lost"),
    "forgotten": (QUEUED, 1, GONE, "lost"),
    "runs": (RUNS, 1, "RUNNING", "running"),
    "runs-and-quiet": (RUNS, 100, "RUNNING", "silent"),
    "quiet-without-a-controller": (RUNS, 100, NO_ANSWER, "silent"),
    "out-of-memory": (RUNS, 100, "OUT_OF_MEMORY", "lost"),
    "time-out": (RUNS, 100, "TIMEOUT", "lost"),
    "preempted-and-in-the-queue": (_ended(75, "preempted"), 0, "PENDING", "queued"),
    "preempted-for-good": (_ended(75, "preempted"), 0, GONE, "preempted"),
    "preempted-in-an-allocation": (_ended(75, "ordered"), 0, "RUNNING", "stopped"),
    "preempted-and-started-again": (_ended(75, "ordered"), 0, GOES_ON, "queued"),
    "stopped-in-its-pod": (_ended(75, "ordered"), 0, "CANCELLED", "stopped"),
    "goes-on": (RUNS, 1, GOES_ON, "running"),
    "goes-on-and-quiet": (RUNS, 100, GOES_ON, "silent"),
    "begins-to-go-on": (QUEUED, 1, GOES_ON, "queued"),
}


@pytest.mark.parametrize(("state", "quiet_s", "slurm", "told"), OF_SLURM.values(), ids=OF_SLURM)
def test_what_is_true_of_a_job_of_slurms(state, quiet_s, slurm, told) -> None:
    assert status_of(state, alive=None, quiet_s=quiet_s, patience_s=60, queue=slurm) == told


@pytest.mark.parametrize(("state", "alive", "quiet_s", "told"), TRUTH.values(), ids=TRUTH)
def test_what_is_true_of_a_job(state, alive, quiet_s, told) -> None:
    assert status_of(state, alive=alive, quiet_s=quiet_s, patience_s=60) == told
