"""Metrics of a job over time, read at the resolution that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.json_lines import estimated_lines, last_json_line, sampled_json_lines

__all__ = ["metrics_rows"]


def metrics_rows(job: JobFolder, most: int) -> Iterator[dict[str, Any]]:
    """About ``most`` rows of a job's metrics, in their order; the newest is among them.

    They are read from the coarsest roll-up that has so many: between two rows of a sample nothing
    is known, and a row of a roll-up tells what was least and most in its time.
    """
    coarse = [path for path in job.roll_ups.values() if estimated_lines(path) >= most]
    row: dict[str, Any] = {}
    for row in sampled_json_lines(coarse[-1] if coarse else job.metrics, most):
        yield row
    newest = last_json_line(job.metrics)
    if coarse and newest.get("time", 0.0) > row.get("time", 0.0):
        yield newest
