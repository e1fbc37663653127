from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import goodput, metrics_rows, remaining_s, steps_per_s, view_job
from hvdtrain.jobs.recorder import RollUp
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity

SECONDS = 3600


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    spec = JobSpec(options=("-np", "2"), program=("a.py",), folder="/x", created_s=100.0)
    return create_job(tmp_path, spec)


def test_a_view_has_specification_and_state(job: JobFolder) -> None:
    job.write_state(JobState(phase="running", launcher=own_identity(), step=3, ranks=2))
    view = view_job(job)
    assert (view.status, view.is_over) == ("running", False)
    assert (view.spec.program, view.spec.folder, view.created_s) == (("a.py",), "/x", 100.0)
    assert (view.state.step, view.state.ranks, view.ended_s) == (3, 2, None)
    job.write_state(JobState(phase="ended", code=1, cause="exception", since_s=120.0))
    view = view_job(job)
    assert (view.status, view.is_over, view.ended_s) == ("failed", True, 120.0)
    assert set(view.to_json()) == {
        *("name", "status", "created_s", "ended_s", "verdict", "on", "slurm_job"),
        *("program", "options", "folder", "attempt", "ranks", "hosts", "mpi"),
        *("step", "epoch", "total_steps", "saved", "code"),
    }


def test_a_job_with_a_killed_launcher_is_lost(job: JobFolder) -> None:
    gone = dataclasses.replace(own_identity(), pid=1, started_ticks=1)
    job.write_state(JobState(phase="running", launcher=gone))
    job.launcher_output.write_bytes(b"x" * 10_000 + b"\nMemoryError \xff\n")
    view = view_job(job)
    assert (view.status, view.is_over) == ("lost", True)
    assert view.verdict.startswith("hvdtrain run ended without a report")
    assert view.verdict.endswith("MemoryError \ufffd")
    assert len(view.verdict) < 5000


def test_an_unreadable_job_is_unknown(tmp_path: Path, job: JobFolder) -> None:
    view = view_job(JobFolder(tmp_path / "nothing"))
    assert (view.name, view.status, view.spec.program) == ("nothing", "unknown", ())
    assert not view.is_over
    assert view.verdict.startswith(f"{tmp_path}/nothing/state.json can't be read; ")
    (job.path / "spec.json").write_bytes(b"\0" * 100)
    (job.path / "state.json").write_bytes(b"")
    assert view_job(job).status == "unknown"


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> JobFolder:
    """An hour of metrics with one outlier, in which the last interval is not rolled up yet."""
    job = JobFolder(tmp_path_factory.mktemp("job"))
    rows = [
        {"time": float(second), "step": second, "loss": 9.0 if second == 1111 else 0.5}
        for second in range(SECONDS)
    ]
    rolled = {path: RollUp(span_s) for span_s, path in job.roll_ups.items()}
    files = {job.metrics: rows} | {
        path: list(filter(None, map(roll_up.add, rows))) for path, roll_up in rolled.items()
    }
    for path, content in files.items():
        path.write_text("".join(f"{json.dumps(row)}\n" for row in content))
    return job


@pytest.mark.parametrize(("most", "span_s"), [(40, 60), (300, 10), (1000, 1), (5000, 1)])
def test_the_coarsest_sufficient_roll_up_is_read(hour: JobFolder, most: int, span_s: int) -> None:
    rows = list(metrics_rows(hour, most))
    assert most / 2 <= len(rows) <= most + 1 or len(rows) == SECONDS
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert rows[-1]["step"] == SECONDS - 1, "the newest row is included"
    assert ("loss_max" in rows[0]) == (span_s > 1)
    assert rows[0]["time"] == (span_s - 1) / 2


def test_roll_ups_keep_outliers(hour: JobFolder) -> None:
    assert max(row.get("loss_max", 0.0) for row in metrics_rows(hour, 58)) == 9.0


def test_without_roll_ups_rows_are_sampled(job: JobFolder) -> None:
    assert list(metrics_rows(job, 10)) == []
    for second in range(100):
        append_json_line(job.metrics, {"time": float(second)})
    assert 5 <= len(list(metrics_rows(job, 10))) <= 11


def _rows(*steps: int | None, every_s: float = 1.0) -> list[dict[str, Any]]:
    return [{"time": at * every_s, "step": step} for at, step in enumerate(steps)]


def test_steps_per_second_of_the_last_minute() -> None:
    assert steps_per_s(_rows(0, 10, 20)) == 10
    assert steps_per_s(_rows(*range(60), *range(60, 710, 10))) == 10, "the first minute was slower"
    assert steps_per_s(_rows(0, 100, 5, 7, 9)) == 2, "a restart went back to step 5"
    for rows in ([], _rows(5), _rows(5, 5), _rows(5, 3), [{}], _rows(None, None)):
        assert steps_per_s(rows) is None, rows


def _remaining_s(job: JobFolder, **state: Any) -> float | None:
    job.write_state(JobState(**{"phase": "running", "launcher": own_identity(), **state}))
    return remaining_s(job, view_job(job))


def test_remaining_time(job: JobFolder) -> None:
    assert _remaining_s(job, step=20, total_steps=100) is None, "the speed is unknown"
    for row in _rows(0, 10, 20):
        append_json_line(job.metrics, row)
    assert _remaining_s(job, step=20, total_steps=100) == 8
    assert _remaining_s(job, step=120, total_steps=100) == 0
    assert _remaining_s(job, step=20) is None
    assert _remaining_s(job, step=20, total_steps=100, phase="ended", code=0) is None


def test_goodput_of_the_last_start(job: JobFolder) -> None:
    values = []
    for event in (
        {"kind": "began"},
        {"kind": "summary", "kept": 0.75},
        {"kind": "began"},
        {"kind": "summary", "lost": 0.5},
    ):
        append_json_line(job.events, event)
        values.append(goodput(job))
    assert values == [None, 0.75, None, None]
