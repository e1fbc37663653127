"""Jobs that Slurm runs: submitted by sbatch, described by squeue, cancelled by scancel."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.jobs.backend import JobRequest, QueueState
from hvdtrain.jobs.files import try_lock, write_json
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder
from hvdtrain.jobs.local_queue import job_environment
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import GOES_ON, GONE, NO_ANSWER

__all__ = ["QueueAnswer", "QueueWatcher", "SlurmQueue", "script_path"]

# What a controller that is down takes to say so is its own affair.
TIMEOUT_S = 20.0
# squeue is asked at most this often by all processes of a user on a host, for all jobs together.
INTERVAL_S = 15.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """A call of sbatch.

    Attributes:
        request: The job.
        argv: The command.
        environ: Its variables.
    """

    request: JobRequest
    argv: Sequence[str]
    environ: Mapping[str, str]

    def preview(self) -> str:
        """Return the command: only Slurm knows the hosts."""
        return f"{shlex.join(self.argv)}\n"


class SlurmQueue:
    """The cluster that this is a login or compute node of."""

    def plan(self, request: JobRequest) -> SlurmPlan:
        """Return the call of sbatch; the job's own options of sbatch come last, and win."""
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
        own = {JOB_FOLDER: str(job.path), "PYTHON": spec.python}
        environ = {**job_environment(spec, request.environ), **own}
        return SlurmPlan(request=request, argv=argv, environ=environ)

    def submit(self, plan: SlurmPlan) -> None:
        """Run sbatch, and record the number of the Slurm job; see ``JobBackend``."""
        spec = plan.request.spec
        said = _run(plan.argv, plan.environ, spec.folder)
        # With several clusters theirs stands behind a semicolon.
        number = said.strip().partition(";")[0]
        if not number.isdecimal():
            raise JobError(f"sbatch printed {said!r}, expected the number of a job.")
        plan.request.job.write_spec(dataclasses.replace(spec, slurm_job=number))

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return what squeue printed of them last; see ``JobBackend``."""
        known = _WATCHER.answer()
        # sbatch has not printed the number of the others yet.
        return {
            folder: QueueState("Slurm", *_state_in(known, spec))
            for folder, spec in jobs.items()
            if spec.slurm_job
        }

    def log_lines(self, job: JobFolder, spec: JobSpec, after: str) -> None:
        """Return None: the job's folder has its log."""

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Run scancel, which signals the ranks with ``save``; see ``JobBackend``."""
        if not spec.slurm_job:
            raise JobError(
                f"{job.name} has no number from sbatch yet; try again, or look for it with squeue."
            )
        # A signal would leave a job that is queued where it is.
        signals = ["--batch", "--signal=USR1"] if save and not is_queued else []
        _run(["scancel", *signals, spec.slurm_job])
        if is_queued:
            job.cancel()


def script_path() -> Path:
    """``slurm/train.sh``: in a wheel beside this module, in a checkout where it is.

    Raises:
        JobError: It is in neither place.
    """
    here = Path(__file__).resolve()
    for path in (here.with_name("train.sh"), here.parents[2] / "slurm" / "train.sh"):
        if path.exists():
            return path
    raise JobError(f"slurm/train.sh is not beside {here}; install hvdtrain again.")


@dataclass(frozen=True, kw_only=True)
class QueueAnswer:
    """What squeue printed of this user's jobs.

    Attributes:
        asked_s: When it was started, in seconds since 1970.
        told_s: When it ended.
        jobs: The state of each job that Slurm still knows, and the reason for it, in Slurm's words
            such as PENDING and Priority; None if squeue did not answer.
    """

    asked_s: float = 0.0
    told_s: float = 0.0
    jobs: Mapping[str, Sequence[str]] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since then; negative if the clock was set back."""
        return time.time() - self.told_s


class QueueWatcher:
    """Asks squeue for all jobs of this user at most every ``INTERVAL_S``, whoever wants to know.

    The answer is kept in a file that all processes of the user on this host share.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = QueueAnswer()

    def answer(self) -> QueueAnswer:
        """Return the newest answer, after asking if that is too old."""
        with self._lock:
            if not 0 <= self._newest.age_s < INTERVAL_S:
                try:
                    self._newest = _shared_answer(_cache_path(os.environ))
                except OSError:
                    # No file can be shared: this process asks for itself.
                    self._newest = _ask_squeue()
            return self._newest


_WATCHER = QueueWatcher()


def _shared_answer(path: Path) -> QueueAnswer:
    """The answer in a file; asked again if that is too old and no other process is doing so."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with try_lock(path.with_suffix(".lock")) as lock:
            found = _read_answer(path)
            if 0 <= found.age_s < INTERVAL_S:
                return found
            if lock is not None:
                found = _ask_squeue()
                write_json(path, dataclasses.asdict(found))
                return found
        # Another process is asking: what was told last will do, if that is not long ago.
        if 0 <= found.age_s < 2 * INTERVAL_S:
            return found
        if time.monotonic() > deadline:
            return QueueAnswer()
        time.sleep(POLL_S)


def _cache_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/nowhere"), ".cache")
    # A home may be that of several clusters.
    return Path(base, "hvdtrain", f"squeue-{socket.gethostname()}.json")


def _read_answer(path: Path) -> QueueAnswer:
    try:
        return QueueAnswer(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return QueueAnswer()


def _ask_squeue() -> QueueAnswer:
    asked_s = time.time()
    argv = ["squeue", "--noheader", "--states=all", "--format=%i %T %r", f"--user={os.getuid()}"]
    jobs = None
    with contextlib.suppress(JobError):
        found = re.findall(r"^\s*(\d+) (\w+) ?(.*?)\s*$", _run(argv), re.MULTILINE)
        jobs = {number: (state, reason) for number, state, reason in found}
    return QueueAnswer(asked_s=asked_s, told_s=time.time(), jobs=jobs)


def _state_in(known: QueueAnswer, spec: JobSpec) -> tuple[str, str]:
    """The word for a job, as ``status_of`` takes it, and the reason."""
    if known.jobs is None:
        return NO_ANSWER, ""
    if spec.slurm_job not in known.jobs:
        # One that was submitted since then is in the queue.
        return ("PENDING" if spec.created_s > known.asked_s else GONE), ""
    word, reason = known.jobs[spec.slurm_job]
    # slurm/train.sh queues a job again that was preempted, which the answer may be too old to show.
    goes_on = word in ("RUNNING", "COMPLETING") and spec.backend.kind == "slurm"
    return (GOES_ON if goes_on else word), reason


def _run(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, folder: str | None = None
) -> str:
    try:
        done = subprocess.run(
            list(argv),
            env=None if environ is None else dict(environ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise JobError(
            f"{error.filename} is not there; {argv[0]} is on Slurm's login and compute nodes."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"{argv[0]} did not answer: {error}") from None
    if done.returncode != 0:
        raise JobError(f"{argv[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
