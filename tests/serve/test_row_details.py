from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import JobView
from hvdtrain.jobs.json_lines import append_json_line
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.serve import row_details
from hvdtrain.serve.row_details import RowDetails

RUNS = JobView(name="a", status="running")
DONE = JobView(name="a", status="done")


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    spec = JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0)
    return create_job(tmp_path, spec)


def test_a_curve_has_few_points_whatever_a_job_wrote(job: JobFolder) -> None:
    nothing = RowDetails().of(job, DONE)
    assert nothing["curve"] == {"of": "rate", "values": []}
    assert (nothing["goodput"], nothing["metrics"]) == (None, {})
    for step in range(1000):
        append_json_line(job.metrics, {"time": float(step), "step": step, "loss": 1000 - step})
    append_json_line(job.events, {"kind": "summary", "kept": 0.5})
    details = RowDetails().of(job, DONE)
    values = details["curve"]["values"]
    assert details["curve"]["of"] == "loss"
    assert (values[0], values[-1], details["goodput"]) == (1000, 1, 0.5)
    assert 20 <= len(values) <= row_details.POINTS + 2


def test_where_there_is_no_loss_the_curve_is_of_samples(job: JobFolder) -> None:
    # The second time it begins anew.
    for time_s, samples in enumerate([0, 10, 30, 0, 40]):
        append_json_line(job.metrics, {"time": float(time_s), "step": 1, "samples": samples})
    assert RowDetails().of(job, RUNS)["curve"] == {"of": "rate", "values": [10, 20, 40]}


def test_what_has_not_changed_is_not_read_again(job: JobFolder, monkeypatch) -> None:
    append_json_line(job.metrics, {"time": 1.0, "step": 1, "loss": 2.0})
    read = []
    monkeypatch.setattr(
        row_details, "_curve", lambda rows: read.append(rows) or {"of": "loss", "values": []}
    )
    details = RowDetails()
    for _ in range(3):
        details.of(job, DONE)
    assert len(read) == 1
    # A curve of what runs may be some seconds old; its newest numbers may not.
    append_json_line(job.metrics, {"time": 2.0, "step": 2, "loss": 1.0})
    assert details.of(job, RUNS)["metrics"]["step"] == 2
    assert len(read) == 1
    append_json_line(job.metrics, {"time": 3.0, "step": 3, "loss": 1.0})
    details.of(job, DONE)
    assert len(read) == 2
