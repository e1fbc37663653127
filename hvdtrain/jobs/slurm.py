"""Slurm's queue: sbatch submits jobs, squeue describes them, scancel cancels them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.jobs.files import try_lock, write_json
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder, JobRequest
from hvdtrain.jobs.local_queue import job_environment
from hvdtrain.jobs.queue_watcher import QueueAnswer, QueueWatcher
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import GONE, NO_ANSWER, RESTARTABLE, QueueState

__all__ = ["SlurmQueue", "SqueueAnswer", "script_path"]

TIMEOUT_S = 20.0
# The shortest time between two calls of squeue by all processes of a user on a host.
INTERVAL_S = 15.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """The sbatch command that submits a job."""

    request: JobRequest
    argv: Sequence[str]
    environ: Mapping[str, str]

    def preview(self) -> str:
        """Return the command. The hosts are not known, because Slurm chooses them later."""
        return f"{shlex.join(self.argv)}\n"


class SlurmQueue:
    """The Slurm cluster of this login or compute node; see ``JobBackend`` for its methods."""

    def __init__(self) -> None:
        self._watcher = QueueWatcher(_newest_answer, INTERVAL_S)

    def plan(self, request: JobRequest) -> SlurmPlan:
        """Return the sbatch command, in which the job's own options override the defaults."""
        job, spec = request.job, request.spec
        argv = [
            "sbatch",
            "--parsable",
            f"--job-name={job.name}",
            f"--output={job.path / 'slurm.txt'}",
            *([] if request.ranks is None else [f"--ntasks={request.ranks}"]),
            *spec.backend.options,
            str(script_path()),
            *spec.options,
            "--",
            *spec.program,
        ]
        environ = {
            **job_environment(spec, request.environ),
            JOB_FOLDER: str(job.path),
            "PYTHON": spec.python,
        }
        return SlurmPlan(request=request, argv=argv, environ=environ)

    def submit(self, plan: SlurmPlan) -> None:
        """Run sbatch and record the ID of the Slurm job."""
        spec = plan.request.spec
        output = _run(plan.argv, plan.environ, spec.folder)
        # With several clusters, sbatch prints "ID;CLUSTER".
        slurm_job = output.strip().partition(";")[0]
        if not slurm_job.isdecimal():
            raise JobError(f"sbatch printed {output!r}, expected a job ID.")
        plan.request.job.write_spec(dataclasses.replace(spec, slurm_job=slurm_job))

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return the states that squeue printed last."""
        answer = self._watcher.answer()
        # Jobs without an ID are still being submitted.
        return {
            folder: QueueState("Slurm", *answer.state_of(spec))
            for folder, spec in jobs.items()
            if spec.slurm_job
        }

    def log_lines(self, job: JobFolder, spec: JobSpec, after: str) -> None:
        """Return None, because the log is in the job's folder."""

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Run scancel.

        If ``save`` is true and the job has started, scancel only sends a signal to the job. The job
        then saves a checkpoint and stops.
        """
        if not spec.slurm_job:
            raise JobError(
                f"the Slurm job ID of {job.name} is not known yet; try again, or use squeue."
            )
        if is_queued and save:
            # The job may have started meanwhile, because squeue's answer and the job's folder may
            # be seen half a minute late.
            is_queued = "RUNNING" not in _run(["squeue", "-h", "-o%T", f"-j{spec.slurm_job}"])
        # A queued job receives no signals, so it would stay in the queue.
        signals = ["--batch", "--signal=USR1"] if save and not is_queued else []
        _run(["scancel", *signals, spec.slurm_job])
        if is_queued:
            job.mark_cancelled()


def script_path() -> Path:
    """Return the path of ``slurm/train.sh``.

    An installed wheel has the script next to this module. A checkout has it in ``slurm/``.

    Raises:
        JobError: If the script does not exist.
    """
    here = Path(__file__).resolve()
    for path in (here.with_name("train.sh"), here.parents[2] / "slurm" / "train.sh"):
        if path.exists():
            return path
    raise JobError(f"slurm/train.sh is missing next to {here}; reinstall hvdtrain.")


@dataclass(frozen=True, kw_only=True)
class SqueueAnswer(QueueAnswer):
    """The output of squeue for all jobs of this user."""

    # the state and the reason of each job that Slurm knows, such as PENDING and Priority, by job
    # ID; None if squeue did not answer
    jobs: Mapping[str, Sequence[str]] | None = None

    def state_of(self, spec: JobSpec) -> tuple[str, str]:
        """Return the state of a job, as ``derive_status`` expects it, and the reason."""
        if self.jobs is None:
            return NO_ANSWER, ""
        if spec.slurm_job not in self.jobs:
            # A job that was submitted after squeue started is queued.
            return ("PENDING" if spec.created_s > self.started_s else GONE), ""
        state, reason = self.jobs[spec.slurm_job]
        # slurm/train.sh requeues a preempted job, but an old answer doesn't show that yet.
        if spec.backend.kind == "slurm" and state in ("RUNNING", "COMPLETING"):
            state = RESTARTABLE
        return state, reason


def _newest_answer() -> SqueueAnswer:
    try:
        return _shared_answer(_cache_path(os.environ))
    except OSError:
        # The shared file can't be used.
        return _run_squeue()


def _shared_answer(path: Path) -> SqueueAnswer:
    """Return the answer that this user's processes share. If it is too old, run squeue."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with try_lock(path.with_suffix(".lock")) as is_locked:
            answer = _read_answer(path)
            if answer.is_newer_than(INTERVAL_S):
                return answer
            if is_locked:
                answer = _run_squeue()
                write_json(path, dataclasses.asdict(answer))
                return answer
        # Another process runs squeue; a slightly older answer avoids waiting for it.
        if answer.is_newer_than(2 * INTERVAL_S):
            return answer
        if time.monotonic() > deadline:
            return SqueueAnswer()
        time.sleep(POLL_S)


def _cache_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/nowhere"), ".cache")
    # Several clusters may share a home directory.
    return Path(base, "hvdtrain", f"squeue-{socket.gethostname()}.json")


def _read_answer(path: Path) -> SqueueAnswer:
    try:
        return SqueueAnswer(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return SqueueAnswer()


def _run_squeue() -> SqueueAnswer:
    started_s = time.time()
    argv = ["squeue", "--noheader", "--states=all", "--format=%i %T %r", f"--user={os.getuid()}"]
    jobs = None
    with contextlib.suppress(JobError):
        rows = re.findall(r"^\s*(\d+) (\w+) ?(.*?)\s*$", _run(argv), re.MULTILINE)
        jobs = {number: (state, reason) for number, state, reason in rows}
    return SqueueAnswer(started_s=started_s, ended_s=time.time(), jobs=jobs)


def _run(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, folder: str | None = None
) -> str:
    """Run a Slurm command and return its output."""
    try:
        done = subprocess.run(
            argv,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise JobError(
            f"{error.filename} not found; {argv[0]} is on Slurm's login and compute nodes."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"{argv[0]} did not answer: {error}") from None
    if done.returncode != 0:
        raise JobError(f"{argv[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
