from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.json_lines import append_json_line
from hvdtrain.jobs.process_identity import own_identity
from hvdtrain.jobs.progress import goodput, left_s, steps_per_s
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState


def _rows(*steps: int | None, every_s: float = 1.0) -> list[dict[str, Any]]:
    return [{"time": at * every_s, "step": step} for at, step in enumerate(steps)]


def test_the_pace_is_that_of_late() -> None:
    assert steps_per_s(_rows(0, 10, 20)) == 10
    # The first minute was slower.
    assert steps_per_s(_rows(*range(60), *range(60, 710, 10))) == 10
    # A restart went back to step 5.
    assert steps_per_s(_rows(0, 100, 5, 7, 9)) == 2
    for rows in ([], _rows(5), _rows(5, 5), _rows(5, 3), [{}], _rows(None, None)):
        assert steps_per_s(rows) is None, rows


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    spec = JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0)
    return create_job(tmp_path, spec)


def _left_s(job: JobFolder, **state: Any) -> float | None:
    job.write_state(JobState(**{"phase": "running", "launcher": own_identity(), **state}))
    return left_s(job, view_job(job))


def test_what_is_left_follows_from_the_pace_where_the_end_is_known(job: JobFolder) -> None:
    assert _left_s(job, step=20, total_steps=100) is None, "nothing was measured"
    for row in _rows(0, 10, 20):
        append_json_line(job.metrics, row)
    assert _left_s(job, step=20, total_steps=100) == 8
    assert _left_s(job, step=120, total_steps=100) == 0
    assert _left_s(job, step=20) is None
    assert _left_s(job, step=20, total_steps=100, phase="ended", code=0) is None


def test_goodput_is_that_of_the_last_start(job: JobFolder) -> None:
    told = []
    for event in (
        {"kind": "began"},
        {"kind": "summary", "kept": 0.75},
        {"kind": "began"},
        {"kind": "summary", "lost": 0.5},
    ):
        append_json_line(job.events, event)
        told.append(goodput(job))
    assert told == [None, 0.75, None, None]
