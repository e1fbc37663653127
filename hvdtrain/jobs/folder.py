"""The folders of jobs."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from hvdtrain.errors import JobError
from hvdtrain.jobs.files import from_json, write_json
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, Status, derive_status, is_alive

__all__ = [
    "HEARTBEAT_S",
    "JOBS_DIR",
    "JOB_FOLDER",
    "JobFolder",
    "JobRequest",
    "all_jobs",
    "create_job",
    "find_job",
    "jobs_directory",
]

# The directory that contains the job folders. If this variable is empty, jobs are not recorded.
JOBS_DIR = "HVDTRAIN_JOBS_DIR"
# Set for hvdtrain run when it starts a queued job: the folder of that job.
JOB_FOLDER = "HVDTRAIN_JOB_FOLDER"
# A launcher touches its state file at this interval. Readers consider the launcher silent if it has
# not done so for PATIENCE_S.
HEARTBEAT_S = 15.0
PATIENCE_S = 4 * HEARTBEAT_S
_MOST_SUGGESTIONS = 3
_SIMILARITY = 0.7
_OUTPUT_TAIL_BYTES = 4096

_Content = TypeVar("_Content")


class _File:
    """A path in a job's folder, which is only computed when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, job: JobFolder, owner: type[JobFolder]) -> Path:
        return job.path / self._name


class JobFolder:
    """The folder of one job.

    Attributes:
        path: The folder.
        events: The job's events, as JSON Lines.
        metrics: The job's progress, as JSON Lines with about one row per second.
        ranks: Measurements of each rank, as JSON Lines.
        log: The folder that contains the log.
        launcher_output: The launcher's stdout and stderr, such as a traceback.
        restart_lock: A file that a process locks while it restarts the job.
    """

    events = _File("events.jsonl")
    metrics = _File("metrics.jsonl")
    ranks = _File("ranks.jsonl")
    log = _File("log")
    launcher_output = _File("launcher.txt")
    restart_lock = _File("restart.lock")
    _spec = _File("spec.json")
    _state = _File("state.json")

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def roll_ups(self) -> dict[int, Path]:
        """Files with one row of metrics per interval, keyed by the interval in seconds."""
        return {10: self.path / "metrics-10s.jsonl", 60: self.path / "metrics-1min.jsonl"}

    @property
    def _stop_requests(self) -> dict[int, Path]:
        return {signal.SIGTERM: self.path / "stop", signal.SIGUSR1: self.path / "save-and-stop"}

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.path.name

    def created_s(self) -> float:
        """Return when the job was last submitted, in seconds since 1970; 0 if unknown.

        If the specification is missing, return when the folder last changed.
        """
        return _modified_s(self._spec) or _modified_s(self.path)

    def heartbeat_s(self) -> float:
        """Return when the state was last written or touched, in seconds since 1970; 0 if never."""
        return _modified_s(self._state)

    def launcher_output_tail(self) -> str:
        """Return the last output of the launcher, such as a traceback."""
        try:
            with self.launcher_output.open("rb") as file:
                size = self.launcher_output.stat().st_size
                file.seek(max(0, size - _OUTPUT_TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def read_spec(self) -> JobSpec:
        """Read the specification.

        Raises:
            JobError: If the specification can't be read.
        """
        return _read(self._spec, JobSpec)

    def read_state(self) -> JobState | None:
        """Read the newest state; None if it can't be read."""
        try:
            return _read(self._state, JobState)
        except JobError:
            return None

    def status(self, state: JobState | None, queue_state: str | None = None) -> Status:
        """Return the status of the job. ``queue_state`` is explained in ``derive_status``."""
        quiet_s = time.time() - self.heartbeat_s()
        launcher = state.launcher if state is not None else None
        alive = is_alive(launcher) if launcher is not None else None
        if launcher is not None and alive is None and launcher.host == socket.gethostname():
            # The launcher ran before a reboot or runs in another container: only its heartbeat
            # is visible.
            alive = False if quiet_s > PATIENCE_S else None
        return derive_status(
            state, alive=alive, quiet_s=quiet_s, patience_s=PATIENCE_S, queue_state=queue_state
        )

    def discard(self) -> None:
        """Remove the folder of a job that could not be submitted."""
        files = (self._spec, self._state, self.launcher_output, *self._stop_requests.values())
        for path in files:
            path.unlink(missing_ok=True)
        # If the user has put files here, they are kept, and rmdir() fails.
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_spec(self, spec: JobSpec) -> None:
        """Replace the specification."""
        write_json(self._spec, asdict(spec))

    def write_state(self, state: JobState) -> None:
        """Replace the state atomically."""
        write_json(self._state, asdict(state))

    def mark_cancelled(self) -> None:
        """Record that the job was cancelled in the queue."""
        state = self.read_state() or JobState(phase="queued")
        code, verdict = 128 + signal.SIGTERM, "the job was cancelled while it was queued"
        self.write_state(replace(state, phase="ended", code=code, cause="ordered", verdict=verdict))

    def touch_state(self) -> None:
        """Send a heartbeat, which says that the last written state is still valid."""
        os.utime(self._state)

    def request_stop(self, number: int) -> None:
        """Ask the launcher, even on a different host, to act as if it had received a signal.

        SIGTERM stops the job. SIGUSR1 lets the ranks save a checkpoint first.
        """
        self._stop_requests[number].touch(mode=0o600)

    def take_stop_request(self) -> int | None:
        """Remove the stop request and return its signal; None if there is no request."""
        for number, path in self._stop_requests.items():
            if path.exists():
                path.unlink(missing_ok=True)
                return number
        return None


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job to plan and submit."""

    job: JobFolder  # the job's folder; it may not exist yet
    spec: JobSpec
    environ: Mapping[str, str]  # the environment of the process that submits the job
    ranks: int | None  # the number of ranks; by default the most that fit


def jobs_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the directory that contains the job folders; None if jobs are not recorded."""
    if (named := environ.get(JOBS_DIR)) is not None:
        return Path(named).absolute() if named else None
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base, "hvdtrain", "jobs").absolute()
    home = environ.get("HOME")
    return Path(home, ".local", "state", "hvdtrain", "jobs").absolute() if home else None


def create_job(directory: Path, spec: JobSpec) -> JobFolder:
    """Create a job's folder with a unique name, and write the specification into it.

    If Slurm has requeued the job, its existing folder is returned instead.

    Raises:
        OSError: If the folder can't be created.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    created = time.strftime("%Y%m%d-%H%M%S", time.localtime(spec.created_s))
    suffix = f"slurm{spec.slurm_job}" if spec.slurm_job else created
    stem = f"{_short_name(spec.program)}-{suffix}"
    for number in itertools.count(1):
        job = JobFolder(directory / (stem if number == 1 else f"{stem}-{number}"))
        try:
            job.path.mkdir(mode=0o700)
        except FileExistsError:
            if spec.slurm_restarts and _is_same_job(job, spec):
                return job
            continue
        try:
            job.write_spec(spec)
        except OSError:
            job.discard()
            raise
        break
    return job


def _is_same_job(job: JobFolder, spec: JobSpec) -> bool:
    """Return whether a folder was created for this job before Slurm requeued the job."""
    try:
        old = job.read_spec()
    except JobError:
        return False
    return (old.program, old.options, old.folder) == (spec.program, spec.options, spec.folder)


def all_jobs(directory: Path) -> list[JobFolder]:
    """Return the folders of all jobs, sorted by name."""
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except FileNotFoundError:
        return []
    return [JobFolder(directory / name) for name in sorted(names)]


def find_job(directory: Path, name: str) -> JobFolder:
    """Return the job called ``name``, or the only job whose name starts with ``name``.

    Raises:
        JobError: If there is no such job, or more than one.
    """
    names = [job.name for job in all_jobs(directory)]
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    if len(matches) == 1 and name:
        return JobFolder(directory / matches[0])
    similar = matches or [known for known in names if _is_similar(name, known)]
    # The newest are last.
    shown = ", ".join(similar[-_MOST_SUGGESTIONS:])
    problem = f"{len(matches)} jobs start with" if len(matches) > 1 else "there is no job"
    hint = f"; did you mean {shown}?" if similar else f" in {directory}."
    raise JobError(f"{problem} {name!r}{hint} hvdtrain jobs lists all jobs.")


def _is_similar(name: str, known: str) -> bool:
    """Return whether ``name`` may be a misspelling of ``known``, or of its first characters."""
    return any(
        difflib.SequenceMatcher(None, name.lower(), part.lower()).ratio() > _SIMILARITY
        for part in (known, known[: len(name)], known.partition("-")[0])
    )


def _short_name(program: Sequence[str]) -> str:
    """Return a short name for a program: ``train`` for ``python -u train.py --epochs 3``."""
    scripts = [word for word in program if word.endswith(".py")]
    modules = [after for word, after in itertools.pairwise(program) if word == "-m"]
    name = Path([*scripts, *modules, *program[:1], "job"][0]).name.removesuffix(".py")
    # Only characters that are safe in shells, URLs and paths.
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-_")[:40] or "job"


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, kind: type[_Content]) -> _Content:
    try:
        return from_json(kind, json.loads(path.read_bytes()))
    except JobError as error:
        raise JobError(f"{path} is not valid: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError(f"{path} can't be read: {reason}") from None
