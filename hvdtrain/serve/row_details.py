"""Details that the list shows of a job beside its state, kept until the job's files change."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView
from hvdtrain.jobs.json_lines import last_json_line, sampled_json_lines
from hvdtrain.jobs.progress import goodput, left_s

__all__ = ["RowDetails"]

POINTS = 32
# A curve of a job that runs is drawn anew no more often than this.
CURVE_INTERVAL_S = 10.0
MOST_KEPT = 5000


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Details that were read of a job, and of which files."""

    files: tuple[int, ...]
    read_at: float
    curve: Mapping[str, Any]
    goodput: float | None
    metrics: Mapping[str, Any]


class RowDetails:
    """Reads what rows of the list need; may be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def of(self, job: JobFolder, view: JobView) -> Mapping[str, Any]:
        """``metrics``, ``curve``, ``goodput`` and ``left_s`` of a job.

        The curve has ``values`` from the first to the last, and what they are ``of``: the loss, or
        samples per second where a program tells of no loss.
        """
        kept = self._read(job, is_over=view.is_over)
        return {
            "metrics": kept.metrics,
            "curve": kept.curve,
            "goodput": kept.goodput,
            "left_s": left_s(job, view),
        }

    def _read(self, job: JobFolder, *, is_over: bool) -> _Kept:
        files = (*_stamp(job.metrics), *_stamp(job.events))
        with self._lock:
            kept = self._kept.get(job.name)
        if kept is not None and kept.files == files:
            return kept
        now = time.monotonic()
        if kept is None or is_over or now - kept.read_at > CURVE_INTERVAL_S:
            rows = list(sampled_json_lines(job.metrics, POINTS))
            last = rows[-1] if rows else {}
            read = _Kept(
                files=files,
                read_at=now,
                curve=_curve(rows),
                goodput=goodput(job) if is_over else None,
                metrics=last,
            )
        else:
            read = replace(kept, files=files, metrics=last_json_line(job.metrics))
        with self._lock:
            self._kept[job.name] = read
            self._kept.move_to_end(job.name)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return read


def _curve(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), (int, float))]
    if losses:
        return {"of": "loss", "values": losses}
    return {"of": "rate", "values": _rates(rows)}


def _rates(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Samples per second between rows, without what lies across a restart."""
    known = [row for row in rows if isinstance(row.get("samples"), (int, float))]
    return [
        (row["samples"] - before["samples"]) / (row["time"] - before["time"])
        for before, row in itertools.pairwise(known)
        if row["time"] > before["time"] and row["samples"] > before["samples"]
    ]


def _stamp(path: Path) -> tuple[int, int]:
    """Return what is different once a file has become longer or another; zeros for none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
