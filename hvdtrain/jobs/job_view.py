"""Views of jobs, read from their folders and queues."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import JobError
from hvdtrain.exit_codes import ExitCode
from hvdtrain.jobs.backend import JobBackend, QueueState
from hvdtrain.jobs.backends import queue_of
from hvdtrain.jobs.files import newest_json_lines
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.metrics import steps_per_s
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import GONE, NO_ANSWER, JobState, Status, status_of

__all__ = ["JobView", "command_line", "left_s", "view_job", "view_jobs"]

# The fields of a specification and of a state that programs and pages get.
_OF_SPEC = ("program", "options", "folder", "slurm_job")
_OF_STATE = (
    *("attempt", "ranks", "hosts", "mpi"),
    *("step", "epoch", "total_steps", "saved", "code"),
)
_NO_SPEC = JobSpec(options=(), program=(), folder="")
_NO_STATE = JobState(phase="queued")


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job as it is now.

    Attributes:
        name: Its name.
        status: Its status.
        spec: Its specification; an empty one if it can't be read.
        state: Its newest state; that of a job without ranks if it can't be read.
        created_s: When it was submitted, in seconds since 1970.
        ended_s: When it ended; None if it has not.
        verdict: Why it ended, waits, or is not known to run.
    """

    name: str
    status: Status
    spec: JobSpec = _NO_SPEC
    state: JobState = _NO_STATE
    created_s: float = 0.0
    ended_s: float | None = None
    verdict: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs or will run, for certain."""
        return self.status in ("done", "failed", "stopped", "preempted", "lost")

    @property
    def doubt(self) -> str:
        """Why it is unknown whether the job runs; empty if it is known."""
        return f"{self.name} may be running: {self.verdict}" if self.status == "unknown" else ""

    def require_known(self) -> None:
        """Check that it is known whether the job runs.

        Raises:
            JobError: It is not; the message says why.
        """
        if self.doubt:
            raise JobError(self.doubt)

    def to_json(self) -> Mapping[str, Any]:
        """Return the view as flat JSON."""
        own = ("name", "status", "created_s", "ended_s", "verdict")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.spec, name) for name in _OF_SPEC},
            **{name: getattr(self.state, name) for name in _OF_STATE},
            "on": self.spec.backend.kind,
        }


def view_job(job: JobFolder) -> JobView:
    """Return the view of a job."""
    return view_jobs([job])[0]


def view_jobs(jobs: Sequence[JobFolder]) -> list[JobView]:
    """Return the views of jobs; queues are asked about jobs whose folders don't tell."""
    found = [(job, job.state(), _spec(job)) for job in jobs]
    asked: dict[JobBackend[Any], dict[Path, JobSpec]] = {}
    for job, state, spec in found:
        if spec is not None and _is_queues(job, state):
            asked.setdefault(queue_of(spec), {})[job.path] = spec
    answers: dict[Path, QueueState] = {}
    for backend, specs in asked.items():
        answers |= backend.describe(specs)
    return [_view(job, state, spec, answers.get(job.path)) for job, state, spec in found]


def left_s(job: JobFolder, view: JobView) -> float | None:
    """Return the seconds until a running job ends, at its current pace; None if unknown."""
    state = view.state
    if view.status != "running" or state.total_steps is None or state.step is None:
        return None
    pace = steps_per_s(newest_json_lines(job.metrics))
    return None if pace is None else max(0, state.total_steps - state.step) / pace


def _spec(job: JobFolder) -> JobSpec | None:
    try:
        return job.spec()
    except JobError:
        return None


def _is_queues(job: JobFolder, state: JobState | None) -> bool:
    """Return whether the queue may know more of a job than its folder."""
    if state is None:
        return False
    if state.phase == "ended":
        # Preempted, it may be in the queue again.
        return state.code == ExitCode.PREEMPTED
    return state.launcher is None or job.status(state) == "silent"


def _view(
    job: JobFolder, state: JobState | None, spec: JobSpec | None, answer: QueueState | None
) -> JobView:
    if answer is not None and answer.state is not None:
        state = answer.state
        status = status_of(state, alive=True, quiet_s=0, patience_s=0)
        if state.phase == "ended" and answer.word != GONE:
            # The queue forgets it some day. What it does not know it may know the next time, as
            # another cluster may have been asked.
            with contextlib.suppress(OSError):
                job.write_state(state)
    else:
        status = job.status(state, answer.word if answer is not None else None)
    created_s = job.created_s() if spec is None else spec.created_s
    ended_s, verdict = None, "" if state is None else state.verdict
    if state is None:
        verdict = (
            f"{job.path / 'state.json'} can't be read; if none of its processes is left, remove "
            "that folder."
        )
    elif state.phase == "ended" and status != "queued":
        ended_s = state.since_s
    elif status in ("lost", "stopped"):
        ended_s, verdict = job.heard_s(), _lost(job, answer)
    if answer is not None and status == "queued":
        waits = f"it waits for {answer.queue}: {answer.why}"
        verdict = waits if answer.why not in ("", "None") else ""
    if answer is not None and answer.word == NO_ANSWER:
        verdict = (
            f"{answer.queue} does not answer, and the job has not been heard of; try again later."
        )
    return JobView(
        name=job.name,
        status=status,
        spec=spec or _NO_SPEC,
        state=state or _NO_STATE,
        created_s=created_s,
        ended_s=ended_s,
        verdict=verdict,
    )


def _lost(job: JobFolder, answer: QueueState | None) -> str:
    said = "its hvdtrain run is gone and left no word: it was killed, or its host went down"
    if answer is not None:
        why = f"{answer.word}: {answer.why}" if answer.why not in ("", "None") else answer.word
        said = (
            f"{answer.queue} ended it, or its node went down, before it could leave a word ({why})"
        )
    words = job.last_words()
    return f"{said}\nits last words:\n{words}" if words else said


def command_line(program: Sequence[str]) -> str:
    """Format a command as a shell takes it, on one line: what can't be shown is escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in shlex.join(program)
    )
