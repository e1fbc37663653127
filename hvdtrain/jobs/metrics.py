"""Metrics of a job over time, as read from its folder, and the pace that follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.jobs.files import (
    last_json_line,
    newest_json_lines,
    read_json_lines,
    sampled_json_lines,
)
from hvdtrain.jobs.folder import JobFolder

__all__ = ["goodput", "metrics_rows", "steps_per_s"]

# Older rows say little about the current pace.
_PACE_WINDOW_S = 60.0


def metrics_rows(job: JobFolder, most: int) -> Iterator[dict[str, Any]]:
    """Yield about ``most`` rows of a job's metrics in order; the newest is among them.

    A long job's rows come from a roll-up: a sample says nothing about the time between its rows,
    but a row of a roll-up has the least and the most of its time.
    """
    first, newest = next(read_json_lines(job.metrics), {}), last_json_line(job.metrics)
    lasted_s = newest.get("time", 0.0) - first.get("time", 0.0)
    fits = [path for s, path in job.roll_ups.items() if s * most <= lasted_s and path.exists()]
    row: dict[str, Any] = {}
    for row in sampled_json_lines([job.metrics, *fits][-1], most):
        yield row
    if newest.get("time", 0.0) > row.get("time", 0.0):
        yield newest


def steps_per_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the steps per second of the last minute; None if unknown.

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
        if until_s - time_s > _PACE_WINDOW_S or earlier > first:
            break
        begin_s, first = time_s, earlier
    return (step - first) / (until_s - begin_s) if step > first and until_s > begin_s else None


def goodput(job: JobFolder) -> float | None:
    """Return the fraction of a job's time spent in steps that were kept; None if unknown."""
    for event in reversed(newest_json_lines(job.events)):
        if event.get("kind") == "summary":
            kept = event.get("kept")
            return kept if isinstance(kept, (int, float)) else None
        if event.get("kind") == "began":
            # Earlier events belong to an earlier start of the job.
            return None
    return None
