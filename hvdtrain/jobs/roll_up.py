"""Many values as a few: what lies between the least and the largest, over ranks and over time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["RollUp", "spread"]

# What metrics measure again and again; and what they count, which only grows. Of all else, such as
# which rank is slow, the newest is what there is to say.
_MEASURED = ("loss", "own_s", "reduced_bytes_per_s")
_COUNTED = ("step", "epoch", "samples")


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """The median of some values as ``name``; with ``name_min``, ``name_p95`` and ``name_max``."""
    all_values = list(values)
    return _parts(name, all_values, all_values, all_values, all_values)


class RollUp:
    """Makes one row out of all that come within so many seconds, and holds no more than these."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take in a row with its ``time``; returns the row of the span that ends before it."""
        ended = None
        if self._rows and self._span_of(row) != self._span_of(self._rows[0]):
            ended = self.end()
        self._rows.append(row)
        return ended

    def end(self) -> dict[str, Any] | None:
        """The row of a span that is not over; None where nothing came in it."""
        rows, self._rows = self._rows, []
        return _rolled(rows) if rows else None

    def _span_of(self, row: Mapping[str, Any]) -> int:
        return int(row["time"] // self._span_s)


def _rolled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rolled = {**rows[-1], "time": round(statistics.fmean(row["time"] for row in rows), 3)}
    for name in _COUNTED:
        if counts := [row[name] for row in rows if name in row]:
            # The time is that in the middle, too.
            rolled[name] = statistics.median_low(counts)
    for name in _MEASURED:
        measured = [row for row in rows if name in row]
        if not measured:
            continue
        # What is rolled up over ranks already keeps its extremes.
        least, high, most = (
            [row.get(f"{name}_{part}", row[name]) for row in measured]
            for part in ("min", "p95", "max")
        )
        parts = _parts(name, least, [row[name] for row in measured], high, most)
        rolled |= {part: float(f"{value:.6g}") for part, value in parts.items()}
    return rolled


def _parts(
    name: str,
    least: Sequence[float],
    middle: Sequence[float],
    high: Sequence[float],
    most: Sequence[float],
) -> dict[str, float]:
    return {
        f"{name}_min": min(least),
        name: statistics.median(middle),
        # By nearest rank: a value that there was, and the largest of less than twenty.
        f"{name}_p95": sorted(high)[-(-len(high) * 95 // 100) - 1],
        f"{name}_max": max(most),
    }
