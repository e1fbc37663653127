from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdtrain.agent.process_tree import start_ticks
from hvdtrain.errors import JobError
from hvdtrain.jobs.files import from_json
from hvdtrain.jobs.state import (
    GONE,
    NO_ANSWER,
    RESTARTABLE,
    JobState,
    ProcessIdentity,
    derive_status,
    is_alive,
    own_identity,
    send_signal,
)

LAUNCHER = ProcessIdentity(host="a", pid=7, started_ticks=8, boot_id="b")
QUEUED = JobState(phase="queued")
RUNNING = JobState(phase="running", launcher=LAUNCHER, hosts={"a": 2}, attempt=1)


def test_a_state_is_restored_from_json() -> None:
    assert from_json(JobState, json.loads(json.dumps(dataclasses.asdict(RUNNING)))) == RUNNING
    assert from_json(JobState, {"phase": "queued", "added_by_a_later_version": 1}) == QUEUED


INVALID = {
    "empty": {},
    "phase": {"phase": "dancing"},
    "launcher": {"phase": "running", "launcher": {"pid": 1}},
    "launcher-type": {"phase": "running", "launcher": 7},
    "hosts": {"phase": "running", "hosts": ["a"]},
    "step": {"phase": "running", "step": "3"},
    "ranks": {"phase": "running", "ranks": None},
    "since": {"phase": "ended", "since_s": "yesterday"},
    "verdict": {"phase": "ended", "verdict": ["killed"]},
}


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID)
def test_an_invalid_state_is_an_error(content) -> None:
    with pytest.raises(JobError):
        from_json(JobState, content)


def _ended(code: int, cause: str) -> JobState:
    return JobState(phase="ended", launcher=LAUNCHER, code=code, cause=cause)


# The state, whether the launcher runs, seconds without a heartbeat, and the state in the queue.
STATUSES = {
    "unreadable": ((None, None, 0), "unknown"),
    "running": ((RUNNING, True, 0), "running"),
    "running-with-a-slow-disk": ((RUNNING, True, 1000), "running"),
    "killed": ((RUNNING, False, 0), "lost"),
    "killed-in-the-queue": ((JobState(phase="queued", launcher=LAUNCHER), False, 0), "lost"),
    "remote": ((RUNNING, None, 30), "running"),
    "remote-and-quiet": ((RUNNING, None, 61), "silent"),
    "submitted": ((QUEUED, None, 1), "queued"),
    "never-started": ((QUEUED, None, 61), "lost"),
    "done": ((_ended(0, "done"), False, 1000), "done"),
    "done-after-a-signal": ((_ended(0, "ordered"), False, 0), "done"),
    "failed": ((_ended(1, "exception"), False, 0), "failed"),
    "stopped": ((_ended(143, "ordered"), False, 0), "stopped"),
    "preempted": ((_ended(75, "preempted"), False, 0), "preempted"),
    "not-startable": ((_ended(125, "infrastructure"), None, 0), "failed"),
    "pending-in-slurm": ((QUEUED, None, 1000, "PENDING"), "queued"),
    "starting-in-slurm": ((QUEUED, None, 1, "RUNNING"), "queued"),
    "no-controller": ((QUEUED, None, 1, NO_ANSWER), "unknown"),
    "cancelled": ((QUEUED, None, 1, "CANCELLED"), "stopped"),
    "failed-without-a-report": ((QUEUED, None, 1, "NODE_FAIL"), "lost"),
    "forgotten": ((QUEUED, None, 1, GONE), "lost"),
    "running-in-slurm": ((RUNNING, None, 1, "RUNNING"), "running"),
    "quiet-in-slurm": ((RUNNING, None, 100, "RUNNING"), "silent"),
    "quiet-without-a-controller": ((RUNNING, None, 100, NO_ANSWER), "silent"),
    "out-of-memory": ((RUNNING, None, 100, "OUT_OF_MEMORY"), "lost"),
    "time-out": ((RUNNING, None, 100, "TIMEOUT"), "lost"),
    "preempted-and-requeued": ((_ended(75, "preempted"), None, 0, "PENDING"), "queued"),
    "preempted-and-gone": ((_ended(75, "preempted"), None, 0, GONE), "preempted"),
    "preempted-in-an-allocation": ((_ended(75, "ordered"), None, 0, "RUNNING"), "stopped"),
    "preempted-and-restartable": ((_ended(75, "ordered"), None, 0, RESTARTABLE), "queued"),
    "stopped-in-its-pod": ((_ended(75, "ordered"), None, 0, "CANCELLED"), "stopped"),
    "restartable": ((RUNNING, None, 1, RESTARTABLE), "running"),
    "restartable-and-quiet": ((RUNNING, None, 100, RESTARTABLE), "silent"),
    "restartable-and-starting": ((QUEUED, None, 1, RESTARTABLE), "queued"),
}


@pytest.mark.parametrize(("known", "status"), STATUSES.values(), ids=STATUSES)
def test_derived_status(known, status: str) -> None:
    state, alive, quiet_s, *queue = known
    queue_state = queue[0] if queue else None
    assert status == derive_status(
        state, alive=alive, quiet_s=quiet_s, patience_s=60, queue_state=queue_state
    )


def test_is_alive_compares_the_whole_identity() -> None:
    own = own_identity()
    assert own.pid == os.getpid()
    assert is_alive(own) is True
    assert is_alive(dataclasses.replace(own, started_ticks=own.started_ticks - 1)) is False
    assert is_alive(dataclasses.replace(own, boot_id="another boot")) is None
    assert is_alive(dataclasses.replace(own, pid_namespace=1)) is None
    # Written by an earlier version.
    assert is_alive(dataclasses.replace(own, pid_namespace=0)) is True
    assert is_alive(dataclasses.replace(own, host="another-host")) is None
    assert is_alive(dataclasses.replace(own, pid=2**22 + 1)) is False


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    sleep = "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def _identity(pid: int) -> ProcessIdentity:
    return dataclasses.replace(own_identity(), pid=pid, started_ticks=start_ticks(pid))


def test_a_zombie_is_not_alive(process: subprocess.Popen[bytes]) -> None:
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
def test_signals_are_not_sent_to_other_processes(process: subprocess.Popen[bytes], change) -> None:
    other = dataclasses.replace(_identity(process.pid), **change)
    assert send_signal(other, signal.SIGKILL) is False
    assert process.poll() is None
