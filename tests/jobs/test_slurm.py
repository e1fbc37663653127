from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JobFolder, JobRequest
from hvdtrain.jobs.slurm import SlurmPlan, SlurmQueue, script_path
from hvdtrain.jobs.spec import LOCAL, Backend, JobSpec
from hvdtrain.jobs.state import GONE, NO_ANSWER, RESTARTABLE, QueueState

SPEC = JobSpec(
    options=("-np", "4", "--max-restarts", "2"),
    program=("python", "a b.py", "$(id)"),
    folder="/work",
    backend=Backend("slurm", ("--partition=gpu",)),
)


def _plan(ranks: int | None, environ: Mapping[str, str]) -> SlurmPlan:
    job = JobFolder(Path("/jobs/a-1"))
    return SlurmQueue().plan(JobRequest(job=job, spec=SPEC, environ=environ, ranks=ranks))


def _describe(queue: SlurmQueue, number: str) -> QueueState:
    """Return a job's state in a queue."""
    return queue.describe({Path("a"): dataclasses.replace(SPEC, slurm_job=number)})[Path("a")]


def test_the_command_of_sbatch() -> None:
    plan = _plan(4, {"HOME": "/root", "HVDTRAIN_MODE": "sync-ps"})
    assert plan.argv == [
        *("sbatch", "--parsable", "--job-name=a-1", "--output=/jobs/a-1/slurm.txt"),
        *("--ntasks=4", "--partition=gpu", str(script_path())),
        *("-np", "4", "--max-restarts", "2", "--", "python", "a b.py", "$(id)"),
    ]
    assert shlex.split(plan.preview()) == plan.argv
    assert plan.environ == {"HOME": "/root", "PYTHON": "", "HVDTRAIN_JOB_FOLDER": "/jobs/a-1"}
    assert not any("ntasks" in word for word in _plan(None, {}).argv)


def test_missing_commands_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _describe(SlurmQueue(), "1").state == NO_ANSWER
    spec = dataclasses.replace(SPEC, folder="/", slurm_job="1")
    environ = {"PATH": str(tmp_path)}
    request = JobRequest(job=JobFolder(tmp_path), spec=spec, environ=environ, ranks=1)
    with pytest.raises(JobError, match="sbatch not found; sbatch is on Slurm's login"):
        SlurmQueue().submit(SlurmQueue().plan(request))
    with pytest.raises(JobError, match="scancel not found"):
        SlurmQueue().cancel(request.job, spec, is_queued=False, save=True)


@pytest.mark.parametrize(
    ("is_queued", "save", "now", "arguments"),
    [
        (False, False, "RUNNING", "7"),
        (False, True, "RUNNING", "--batch --signal=USR1 7"),
        (True, False, "PENDING", "7"),
        # A signal would leave the job in the queue.
        (True, True, "PENDING", "7"),
        # It has just started.
        (True, True, "RUNNING", "--batch --signal=USR1 7"),
    ],
)
def test_cancel(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_queued: bool,
    save: bool,
    now: str,
    arguments: str,
) -> None:
    job = JobFolder(tmp_path / "a-1")
    for name, command in {
        "scancel": f'echo "$*" >> {tmp_path}/calls',
        "squeue": f"echo {now}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o700)
    job.path.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(JobError, match="the Slurm job ID of a-1 is not known yet"):
        SlurmQueue().cancel(job, SPEC, is_queued=is_queued, save=save)
    assert job.read_state() is None
    spec = dataclasses.replace(SPEC, slurm_job="7")
    SlurmQueue().cancel(job, spec, is_queued=is_queued, save=save)
    assert (tmp_path / "calls").read_text() == f"{arguments}\n"
    state = job.read_state()
    assert (state is not None and state.phase == "ended") == (now == "PENDING")


# A slow squeue that logs its calls.
_SQUEUE = """#!/bin/sh
echo "$*" >> {calls}
sleep 0.3
printf '  7 PENDING Priority\\n8 RUNNING None\\n9 CANCELLED (by root)\\n10_[1-4] PENDING None\\n'
"""
_POLL = """
import time
from pathlib import Path
from hvdtrain.jobs.slurm import SlurmQueue
from hvdtrain.jobs.spec import JobSpec
queue, spec = SlurmQueue(), JobSpec(options=(), program=(), folder="/", slurm_job="7")
for _ in range(5):
    assert queue.describe({Path("a"): spec})[Path("a")].state == "PENDING"
    time.sleep(0.1)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a squeue, and return the file that lists its calls."""
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(_SQUEUE.format(calls=tmp_path / "calls"))
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "calls"


def _count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_all_processes_share_one_call_of_squeue(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polling = [subprocess.Popen([sys.executable, "-c", _POLL]) for _ in range(4)]
    assert [process.wait(timeout=60) for process in polling] == [0] * 4
    state = _describe(SlurmQueue(), "9")
    assert (_count(calls), state.state, state.reason) == (1, "CANCELLED", "(by root)")
    monkeypatch.setattr("hvdtrain.jobs.slurm.INTERVAL_S", 0.2)
    time.sleep(0.2)
    _describe(SlurmQueue(), "9")
    assert _count(calls) == 2


def test_a_failed_call_is_not_repeated_at_once(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho x >> {calls}\nexit 1\n")
    assert [_describe(SlurmQueue(), "7").state for _ in range(3)] == [NO_ANSWER] * 3
    assert _count(calls) == 1


def test_without_a_cache_folder_the_process_calls_squeue_itself(
    calls: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()
    queue = SlurmQueue()
    assert [_describe(queue, "7").state for _ in range(3)] == ["PENDING"] * 3
    assert _count(calls) == 1


def test_states_of_jobs_from_a_possibly_outdated_answer(calls: Path) -> None:
    def state(number: str, **changes: object) -> str | None:
        spec = dataclasses.replace(SPEC, slurm_job=number, **{"created_s": 1.0, **changes})
        answers = SlurmQueue().describe({Path("a"): spec})
        return answers[Path("a")].state if answers else None

    assert (state("7"), state("9"), state("11")) == ("PENDING", "CANCELLED", GONE)
    # Submitted after the answer.
    assert state("11", created_s=time.time()) == "PENDING"
    # sbatch has not ended yet.
    assert state("") is None
    # train.sh requeues a preempted job; other scripts may not.
    assert (state("8"), state("8", backend=LOCAL)) == (RESTARTABLE, "RUNNING")
    assert _count(calls) == 1
