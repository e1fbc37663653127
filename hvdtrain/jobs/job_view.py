"""The specification, state and status of jobs, read from their folders and queues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import JobError
from hvdtrain.exit_codes import ExitCode
from hvdtrain.jobs.backends import JobBackend, queue_for
from hvdtrain.jobs.files import (
    last_json_line,
    newest_json_lines,
    read_json_lines,
    sampled_json_lines,
)
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import GONE, NO_ANSWER, JobState, QueueState, Status, derive_status

__all__ = [
    "JobView",
    "goodput",
    "metrics_rows",
    "remaining_s",
    "steps_per_s",
    "view_job",
    "view_jobs",
]

# Fields of a specification and of a state in the JSON of a view.
_SPEC_FIELDS = ("program", "options", "folder", "slurm_job")
_STATE_FIELDS = (
    *("attempt", "ranks", "hosts", "mpi"),
    *("step", "epoch", "total_steps", "saved", "code"),
)
_NO_SPEC = JobSpec(options=(), program=(), folder="")
_NO_STATE = JobState(phase="queued")
# Older rows say little about the current speed.
_SPEED_WINDOW_S = 60.0


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The current specification, state and status of a job."""

    name: str
    status: Status
    spec: JobSpec = _NO_SPEC  # the specification; empty if it can't be read
    state: JobState = _NO_STATE  # the newest state; a queued one if it can't be read
    created_s: float = 0.0  # when the job was submitted, in seconds since 1970
    ended_s: float | None = None  # when it ended; None if it has not
    verdict: str = ""  # why it ended, why it is queued, or why its status is uncertain

    @property
    def is_over(self) -> bool:
        """Whether it is certain that the job has ended."""
        return self.status in ("done", "failed", "stopped", "preempted", "lost")

    @property
    def doubt(self) -> str:
        """Why it is unknown whether the job runs. Empty if it is known."""
        return f"{self.name} may be running: {self.verdict}" if self.status == "unknown" else ""

    def to_json(self) -> Mapping[str, Any]:
        """Return a JSON object with the main fields of the job, its specification and its state."""
        own = ("name", "status", "created_s", "ended_s", "verdict")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.spec, name) for name in _SPEC_FIELDS},
            **{name: getattr(self.state, name) for name in _STATE_FIELDS},
            "on": self.spec.backend.kind,
        }


def view_job(job: JobFolder) -> JobView:
    """Return the current specification, state and status of a job."""
    return view_jobs([job])[0]


def view_jobs(jobs: Sequence[JobFolder]) -> list[JobView]:
    """Return the views of jobs. Queues are only asked if the folder can't tell the status."""
    known = [(job, job.read_state(), _read_spec(job)) for job in jobs]
    queries: dict[JobBackend[Any], dict[Path, JobSpec]] = {}
    for job, state, spec in known:
        if spec is not None and _needs_queue(job, state):
            queries.setdefault(queue_for(spec), {})[job.path] = spec
    answers: dict[Path, QueueState] = {}
    for backend, specs in queries.items():
        answers |= backend.describe(specs)
    return [_view(job, state, spec, answers.get(job.path)) for job, state, spec in known]


def _read_spec(job: JobFolder) -> JobSpec | None:
    try:
        return job.read_spec()
    except JobError:
        return None


def _needs_queue(job: JobFolder, state: JobState | None) -> bool:
    if state is None:
        return False
    if state.phase == "ended":
        # A preempted job may be queued again.
        return state.code == ExitCode.PREEMPTED
    return state.launcher is None or job.status(state) == "silent"


def _view(
    job: JobFolder, state: JobState | None, spec: JobSpec | None, answer: QueueState | None
) -> JobView:
    if answer is not None and answer.job_state is not None:
        state = answer.job_state
        status = derive_status(state, alive=True, quiet_s=0, patience_s=0)
        if state.phase == "ended" and answer.state != GONE:
            # The state is recorded because the queue will forget the job. GONE is not recorded
            # because the query may have gone to a different cluster.
            with contextlib.suppress(OSError):
                job.write_state(state)
    else:
        status = job.status(state, answer.state if answer is not None else None)
    ended_s, verdict = None, "" if state is None else state.verdict
    if state is None:
        verdict = (
            f"{job.path / 'state.json'} can't be read; if none of the job's processes is left, "
            "remove its folder."
        )
    elif state.phase == "ended" and status != "queued":
        ended_s = state.since_s
    elif status in ("lost", "stopped"):
        ended_s, verdict = job.heartbeat_s(), _lost_verdict(job, answer)
    if answer is not None:
        if answer.state == NO_ANSWER:
            verdict = (
                f"{answer.queue} does not answer and the job has not reported; try again later.\n"
                f"{answer.reason}"
            ).rstrip()
        elif status == "queued":
            verdict = f"waiting for {answer.queue}: {answer.reason}" if _has_reason(answer) else ""
    return JobView(
        name=job.name,
        status=status,
        spec=spec or _NO_SPEC,
        state=state or _NO_STATE,
        created_s=job.created_s() if spec is None else spec.created_s,
        ended_s=ended_s,
        verdict=verdict,
    )


def _lost_verdict(job: JobFolder, answer: QueueState | None) -> str:
    if answer is None:
        verdict = "hvdtrain run ended without a report: it was killed or its host went down"
    else:
        reason = f"{answer.state}: {answer.reason}" if _has_reason(answer) else answer.state
        verdict = f"{answer.queue} or a node failure ended the job ({reason})"
    output = job.launcher_output_tail()
    return f"{verdict}\nlast output:\n{output}" if output else verdict


def _has_reason(answer: QueueState) -> bool:
    # Slurm writes "None" if the reason is unknown.
    return answer.reason not in ("", "None")


def metrics_rows(job: JobFolder, most: int) -> Iterator[dict[str, Any]]:
    """Yield about ``most`` rows of a job's metrics in order, including the newest.

    For a long job, these are rows of a roll-up file, which contain the minimum and maximum of each
    interval. A sample of the original rows would miss outliers between the sampled rows.
    """
    first, newest = next(read_json_lines(job.metrics), {}), last_json_line(job.metrics)
    duration_s = newest.get("time", 0.0) - first.get("time", 0.0)
    fits = [path for s, path in job.roll_ups.items() if s * most <= duration_s and path.exists()]
    row: dict[str, Any] = {}
    for row in sampled_json_lines([job.metrics, *fits][-1], most):
        yield row
    if newest.get("time", 0.0) > row.get("time", 0.0):
        yield newest


def steps_per_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the steps per second over the last minute of ``rows``; None if unknown."""
    known = [
        (row["time"], row["step"])
        for row in rows
        if isinstance(row.get("time"), (int, float)) and isinstance(row.get("step"), int)
    ]
    if not known:
        return None
    until_s, step = known[-1]
    begin_s, first = until_s, step
    for time_s, earlier in reversed(known):
        # A restart resets the step to an earlier checkpoint.
        if until_s - time_s > _SPEED_WINDOW_S or earlier > first:
            break
        begin_s, first = time_s, earlier
    return (step - first) / (until_s - begin_s) if step > first and until_s > begin_s else None


def remaining_s(job: JobFolder, view: JobView) -> float | None:
    """Return how many seconds a running job still needs at its current speed; None if unknown."""
    state = view.state
    if view.status != "running" or state.total_steps is None or state.step is None:
        return None
    speed = steps_per_s(newest_json_lines(job.metrics))
    return None if speed is None else max(0, state.total_steps - state.step) / speed


def goodput(job: JobFolder) -> float | None:
    """Return the fraction of a job's time spent on steps that no failure undid; None if unknown."""
    for event in reversed(newest_json_lines(job.events)):
        if event.get("kind") == "summary":
            kept = event.get("kept")
            return kept if isinstance(kept, (int, float)) else None
        if event.get("kind") == "began":
            # Earlier events belong to an earlier start of the job.
            return None
    return None
