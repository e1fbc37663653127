"""The pace of a job, the time that is left, and the part of its time that was worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView
from hvdtrain.jobs.json_lines import newest_json_lines

__all__ = ["goodput", "left_s", "steps_per_s"]

# What is older than this says little of how fast a job is now.
_OF_LATE_S = 60.0


def steps_per_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the steps per second of late; None where that can't be told.

    Args:
        rows: Rows of ``metrics.jsonl``, the newest last.
    """
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
        # After a restart steps are counted from a checkpoint on again.
        if until_s - time_s > _OF_LATE_S or earlier > first:
            break
        begin_s, first = time_s, earlier
    return (step - first) / (until_s - begin_s) if step > first and until_s > begin_s else None


def left_s(job: JobFolder, view: JobView) -> float | None:
    """Return how many seconds a job that runs will take at the pace of late; None for unknown."""
    if view.status != "running" or view.total_steps is None or view.step is None:
        return None
    pace = steps_per_s(newest_json_lines(job.metrics))
    return None if pace is None else max(0, view.total_steps - view.step) / pace


def goodput(job: JobFolder) -> float | None:
    """The part of a job's time that went into steps that were kept; None for not known."""
    for event in reversed(newest_json_lines(job.events)):
        if event.get("kind") == "summary":
            kept = event.get("kept")
            return kept if isinstance(kept, (int, float)) else None
        if event.get("kind") == "began":
            # What came before was told of an earlier start of the job.
            return None
    return None
