"""Metrics of a job over time: summaries of many values, and the pace that follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.jobs.files import (
    last_json_line,
    newest_json_lines,
    read_json_lines,
    sampled_json_lines,
)
from hvdtrain.jobs.folder import JobFolder

__all__ = ["RollUp", "goodput", "metrics_rows", "spread", "steps_per_s"]

# A roll-up keeps the spread of measured values and the middle of counters. For everything else,
# such as the slow rank, it keeps the newest value.
_MEASURED = ("loss", "own_s", "reduced_bytes_per_s")
_COUNTED = ("step", "epoch", "samples")
# Older rows say little about the current pace.
_PACE_WINDOW_S = 60.0


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return the median of some values as ``name``, and ``_min``, ``_p95`` and ``_max`` of it."""
    return _spread_of_spreads(name, [{name: value} for value in values])


def _spread_of_spreads(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the spread of rows which may hold a spread each."""
    low, high, most = (
        [row.get(f"{name}_{part}", row[name]) for row in rows] for part in ("min", "p95", "max")
    )
    return {
        f"{name}_min": min(low),
        name: statistics.median(row[name] for row in rows),
        # By nearest rank: an existing value, and the largest of less than twenty.
        f"{name}_p95": sorted(high)[-(-len(high) * 95 // 100) - 1],
        f"{name}_max": max(most),
    }


class RollUp:
    """Makes one row out of all rows within so many seconds.

    Args:
        span_s: The number of seconds.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add a row, which has a ``time``; return the row of the span that ends before it."""
        spans = {one["time"] // self._span_s for one in [*self._rows[:1], row]}
        ended = self.end() if len(spans) > 1 else None
        self._rows.append(row)
        return ended

    def end(self) -> dict[str, Any] | None:
        """Return the row of the current span; None if it has no rows."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        rolled = {**rows[-1], "time": round(statistics.fmean(row["time"] for row in rows), 3)}
        for name in _COUNTED:
            if counts := [row[name] for row in rows if name in row]:
                # The time is that of the middle, too.
                rolled[name] = statistics.median_low(counts)
        for name in _MEASURED:
            if measured := [row for row in rows if name in row]:
                parts = _spread_of_spreads(name, measured)
                rolled |= {part: float(f"{value:.6g}") for part, value in parts.items()}
        return rolled


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
