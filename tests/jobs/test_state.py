from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from hvdtrain.agent.process_tree import start_ticks
from hvdtrain.errors import JobError
from hvdtrain.jobs.files import from_json
from hvdtrain.jobs.state import (
    GOES_ON,
    GONE,
    NO_ANSWER,
    JobState,
    ProcessIdentity,
    is_alive,
    own_identity,
    send_signal,
    status_of,
)

LAUNCHER = ProcessIdentity(host="a", pid=7, started_ticks=8, boot_id="b")
RUNS = JobState(phase="running", launcher=LAUNCHER, hosts={"a": 2}, attempt=1)


def test_a_state_comes_back_as_it_was() -> None:
    assert from_json(JobState, json.loads(json.dumps(RUNS.to_json()))) == RUNS
    assert from_json(JobState, {"phase": "queued", "colour": 1}) == JobState(phase="queued")


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
        from_json(JobState, content)


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


SLEEPS = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]


def _identity(pid: int) -> ProcessIdentity:
    return dataclasses.replace(own_identity(), pid=pid, started_ticks=start_ticks(pid))


def test_this_process_lives_and_no_other_under_its_number() -> None:
    own = own_identity()
    assert own.pid == os.getpid()
    assert is_alive(own) is True
    assert is_alive(dataclasses.replace(own, started_ticks=own.started_ticks - 1)) is False
    assert is_alive(dataclasses.replace(own, boot_id="another start of the host")) is None
    assert is_alive(dataclasses.replace(own, pid_namespace=1)) is None
    # Written by an earlier version.
    assert is_alive(dataclasses.replace(own, pid_namespace=0)) is True
    assert is_alive(dataclasses.replace(own, host="another-host")) is None
    assert is_alive(dataclasses.replace(own, pid=2**22 + 1)) is False


def test_who_has_ended_is_gone_before_the_parent_asks() -> None:
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        identity = _identity(process.pid)
        assert is_alive(identity) is True
        assert send_signal(identity, signal.SIGKILL) is True
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(identity) is False
        assert send_signal(identity, signal.SIGKILL) is False


@pytest.mark.parametrize(
    "change",
    [{"started_ticks": 1}, {"boot_id": "other"}, {"host": "other"}, {"pid_namespace": 1}],
)
def test_nobody_else_gets_a_signal(change) -> None:
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stranger = dataclasses.replace(_identity(process.pid), **change)
        assert send_signal(stranger, signal.SIGKILL) is False
        assert process.poll() is None
        process.kill()
