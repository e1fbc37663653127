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
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hvdtrain.errors import JobError
from hvdtrain.jobs.files import from_json, write_json
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, Status, is_alive, status_of

__all__ = [
    "HEARTBEAT_S",
    "JOBS_DIR",
    "JOB_FOLDER",
    "JobFolder",
    "all_jobs",
    "create_job",
    "find_job",
    "jobs_directory",
]

# The directory of the folders of jobs; jobs have no folders if it is empty.
JOBS_DIR = "HVDTRAIN_JOBS_DIR"
# The folder of the queued job that hvdtrain run starts.
JOB_FOLDER = "HVDTRAIN_JOB_FOLDER"
# A launcher touches its state this often, in seconds; others give up on it after PATIENCE_S.
HEARTBEAT_S = 15.0
PATIENCE_S = 4 * HEARTBEAT_S
_MOST_NEAR = 3
_CLOSE = 0.7
_LAST_WORDS_BYTES = 4096

_Content = TypeVar("_Content")


class _File:
    """An attribute of a ``JobFolder``: the path of one of its files."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, job: JobFolder, owner: type[JobFolder]) -> Path:
        return job.path / self._name


class JobFolder:
    """The folder of one job.

    Attributes:
        path: The folder.
        events: Events of the job, a row of JSON each.
        metrics: Its progress, a row of JSON about every second.
        ranks: Values of each rank, a row of JSON each time.
        log: The folder of its log.
        words: Output of its launcher before and after it wrote the log.
        restart_lock: Locked by the process that restarts the job.
    """

    events = _File("events.jsonl")
    metrics = _File("metrics.jsonl")
    ranks = _File("ranks.jsonl")
    log = _File("log")
    words = _File("launcher.txt")
    restart_lock = _File("restart.lock")
    _spec = _File("spec.json")
    _state = _File("state.json")

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The job's name."""
        return self.path.name

    @property
    def roll_ups(self) -> dict[int, Path]:
        """Files with a row of metrics for each span of so many seconds, the shortest first."""
        return {10: self.path / "metrics-10s.jsonl", 60: self.path / "metrics-1min.jsonl"}

    @property
    def _stop_requests(self) -> Mapping[int, Path]:
        return {
            signal.SIGTERM: self.path / "stop",
            signal.SIGUSR1: self.path / "save-and-stop",
        }

    def created_s(self) -> float:
        """Return when it was last submitted, in seconds since 1970; 0 if unknown.

        Without a specification it is when its folder last changed.
        """
        return _changed_s(self._spec) or _changed_s(self.path)

    def heard_s(self) -> float:
        """Return when its state was last written or touched, in seconds since 1970; 0 if never."""
        return _changed_s(self._state)

    def last_words(self) -> str:
        """Return the last output of its launcher, such as a traceback."""
        try:
            with self.words.open("rb") as file:
                file.seek(max(0, self.words.stat().st_size - _LAST_WORDS_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def spec(self) -> JobSpec:
        """Read the specification.

        Raises:
            JobError: It can't be read.
        """
        return _read(self._spec, JobSpec)

    def state(self) -> JobState | None:
        """Read the newest state; None if it can't be read."""
        try:
            return _read(self._state, JobState)
        except JobError:
            return None

    def status(self, state: JobState | None, queue: str | None = None) -> Status:
        """Return the status of the job in a state; ``queue`` as in ``status_of``."""
        quiet_s = time.time() - self.heard_s()
        launcher = state.launcher if state is not None else None
        alive = is_alive(launcher) if launcher is not None else None
        if launcher is not None and alive is None and launcher.host == socket.gethostname():
            # It ran before a reboot, or runs in another container: its heartbeat decides.
            alive = False if quiet_s > PATIENCE_S else None
        return status_of(state, alive=alive, quiet_s=quiet_s, patience_s=PATIENCE_S, queue=queue)

    def discard(self) -> None:
        """Remove the folder of a job that could not be submitted."""
        for path in (self._spec, self._state, self.words):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # The user has put other files there.
            self.path.rmdir()

    def write_spec(self, spec: JobSpec) -> None:
        """Replace the specification.

        Raises:
            OSError: It can't be written.
        """
        write_json(self._spec, spec.to_json())

    def write_state(self, state: JobState) -> None:
        """Replace the state.

        Raises:
            OSError: It can't be written; the state before is unchanged.
        """
        write_json(self._state, state.to_json())

    def cancel(self) -> None:
        """Mark the job as cancelled in the queue.

        Raises:
            OSError: It can't be written.
        """
        before = self.state() or JobState(phase="queued")
        code, verdict = 128 + signal.SIGTERM, "the job was cancelled before its turn"
        self.write_state(
            replace(before, phase="ended", code=code, cause="ordered", verdict=verdict)
        )

    def touch_state(self) -> None:
        """Confirm that the state that was written last still holds.

        Raises:
            OSError: That can't be said.
        """
        os.utime(self._state)

    def request_stop(self, number: int) -> None:
        """Ask the launcher on any host to stop the job.

        Args:
            number: The signal that it stands for: SIGTERM, or SIGUSR1 to save a checkpoint first.

        Raises:
            OSError: The request can't be written.
        """
        self._stop_requests[number].touch(mode=0o600)

    def take_stop(self) -> int | None:
        """Remove a request to stop the job, and return its signal; None if there is none.

        Raises:
            OSError: The folder can't be read.
        """
        for number, path in self._stop_requests.items():
            if path.exists():
                path.unlink(missing_ok=True)
                return number
        return None


def jobs_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of the folders of jobs; None if jobs have none."""
    if (named := environ.get(JOBS_DIR)) is not None:
        return Path(named).absolute() if named else None
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base, "hvdtrain", "jobs").absolute()
    home = environ.get("HOME")
    return Path(home, ".local", "state", "hvdtrain", "jobs").absolute() if home else None


def create_job(directory: Path, spec: JobSpec) -> JobFolder:
    """Create the folder of a job, with a unique name and ``spec`` in it.

    A Slurm job that is requeued keeps its folder.

    Raises:
        OSError: It can't be created.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    word = _word(spec.program)
    time_words = time.strftime("%Y%m%d-%H%M%S", time.localtime(spec.created_s))
    stem = f"{word}-slurm{spec.slurm_job}" if spec.slurm_job else f"{word}-{time_words}"
    number = 1
    while True:
        job = JobFolder(directory / (stem if number == 1 else f"{stem}-{number}"))
        try:
            job.path.mkdir(mode=0o700)
        except FileExistsError:
            if spec.slurm_restarts and _same(job, spec):
                return job
            number += 1
        else:
            try:
                job.write_spec(spec)
            except OSError:
                job.discard()
                raise
            return job


def _same(job: JobFolder, spec: JobSpec) -> bool:
    """Return whether a folder is that of this job, which Slurm has started before."""
    try:
        before = job.spec()
    except JobError:
        return False
    return (before.program, before.options, before.folder) == (
        spec.program,
        spec.options,
        spec.folder,
    )


def all_jobs(directory: Path) -> list[JobFolder]:
    """Return all jobs, sorted by name."""
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except FileNotFoundError:
        return []
    return [JobFolder(directory / name) for name in sorted(names)]


def find_job(directory: Path, name: str) -> JobFolder:
    """The job of that name, or the one whose name begins so.

    Raises:
        JobError: There is none, or more than one begins so.
    """
    names = [job.name for job in all_jobs(directory)]
    begun = [name] if name in names else [known for known in names if known.startswith(name)]
    if len(begun) == 1 and name:
        return JobFolder(directory / begun[0])
    near = begun or [known for known in names if _are_close(name, known)]
    # Of many the newest, which stand last.
    shown = ", ".join(near[-_MOST_NEAR:])
    what = f"{len(begun)} jobs begin with" if begun else "there is no job"
    hint = f"; do you mean {shown}?" if near else f" in {directory}."
    raise JobError(f"{what} {name!r}{hint} hvdtrain jobs lists all.")


def _are_close(name: str, known: str) -> bool:
    """Whether ``name`` may be a misspelling of ``known``, or of the beginning of it."""
    return any(
        difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio() > _CLOSE
        for other in (known, known[: len(name)], known.partition("-")[0])
    )


def _word(program: Sequence[str]) -> str:
    """Return a short name for a program: train for ``python -u train.py --epochs 3``."""
    scripts = [word for word in program if word.endswith(".py")]
    modules = [after for word, after in itertools.pairwise(program) if word == "-m"]
    name = Path([*scripts, *modules, *program[:1], "job"][0]).name.removesuffix(".py")
    # Nothing that a shell, a page or a path would take for more than a name.
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-_")[:40] or "job"


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, kind: type[_Content]) -> _Content:
    try:
        return from_json(kind, json.loads(path.read_bytes()))
    except JobError as error:
        raise JobError(f"{path} can't be used: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError(f"{path} can't be read: {why}") from None
