from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import left_s, view_job
from hvdtrain.jobs.metrics import goodput, metrics_rows, steps_per_s
from hvdtrain.jobs.recorder import RollUp, spread
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity

SECONDS = 3600


def _rolled(*rows: dict[str, Any], span_s: float = 60.0) -> dict[str, Any]:
    roll_up = RollUp(span_s)
    for row in rows:
        assert roll_up.add(row) is None
    rolled = roll_up.end()
    assert rolled is not None
    return rolled


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3, 3, 3, 3)),
        ([2.0, 1.0], (1, 1.5, 2, 2)),
        (range(19, 0, -1), (1, 10, 19, 19)),
        (range(100), (0, 49.5, 94, 99)),
        (range(1000), (0, 499.5, 949, 999)),
    ],
)
def test_many_values_are_four(values: Any, expected: tuple[float, ...]) -> None:
    parts = ("x_min", "x", "x_p95", "x_max")
    assert spread("x", values) == dict(zip(parts, expected))


def test_a_row_tells_of_all_within_its_time() -> None:
    rows = [
        {"time": 60.0 + second, "step": 7 * second, "loss": 1 / (1 + second), "epoch": second // 30}
        for second in range(60)
    ]
    assert _rolled(*rows) == {
        "time": 89.5,
        "step": 7 * 29,
        "epoch": 0,
        "loss_min": pytest.approx(1 / 60, rel=1e-5),
        "loss": pytest.approx((1 / 30 + 1 / 31) / 2, rel=1e-5),
        "loss_p95": pytest.approx(1 / 4, rel=1e-5),
        "loss_max": 1.0,
    }


def test_extremes_of_ranks_are_kept() -> None:
    first = {"time": 1.0, **spread("own_s", [0.1, 0.2, 0.9])}
    second = {"time": 2.0, **spread("own_s", [0.05, 0.3, 0.4])}
    rolled = _rolled(first, second, {"time": 3.0, "own_s": 0.25})
    assert [rolled[f"own_s{part}"] for part in ("_min", "", "_p95", "_max")] == [
        *(0.05, 0.25, 0.9, 0.9)
    ]


def test_who_is_slow_now_is_what_there_is_to_say() -> None:
    slow = {"slow": 3, "slow_host": "node1", "slow_factor": 2.0}
    assert _rolled({"time": 1.0, "slow": 1}, {"time": 2.0, **slow}) == {"time": 1.5, **slow}
    assert _rolled({"time": 1.0, **slow}, {"time": 2.0, "step": 3}) == {"time": 1.5, "step": 3}


def test_a_row_ends_with_the_first_that_is_not_of_its_time() -> None:
    roll_up = RollUp(10.0)
    assert roll_up.end() is None
    assert roll_up.add({"time": 8.0, "step": 1}) is None
    assert roll_up.add({"time": 9.9, "step": 2}) is None
    assert roll_up.add({"time": 10.0, "step": 3}) == {"time": 8.95, "step": 1}
    # Nothing came for long, and then a clock was set back.
    assert roll_up.add({"time": 95.0, "step": 4}) == {"time": 10.0, "step": 3}
    assert roll_up.add({"time": 5.0, "step": 5}) == {"time": 95.0, "step": 4}
    assert roll_up.end() == {"time": 5.0, "step": 5}
    assert roll_up.end() is None


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> JobFolder:
    """An hour with one bad second; the last minute is not rolled up yet."""
    job = JobFolder(tmp_path_factory.mktemp("job"))
    files = {path: (RollUp(span_s), path.open("w")) for span_s, path in job.roll_ups.items()}
    with job.metrics.open("w") as metrics:
        for second in range(SECONDS):
            row = {"time": float(second), "step": second, "loss": 9.0 if second == 1111 else 0.5}
            metrics.write(f"{row}\n".replace("'", '"'))
            for roll_up, file in files.values():
                if (ended := roll_up.add(row)) is not None:
                    file.write(f"{ended}\n".replace("'", '"'))
    for _, file in files.values():
        file.close()
    return job


@pytest.mark.parametrize(("most", "span_s"), [(40, 60), (300, 10), (1000, 1), (5000, 1)])
def test_the_coarsest_that_has_enough_is_read(hour: JobFolder, most: int, span_s: int) -> None:
    rows = list(metrics_rows(hour, most))
    assert most / 2 <= len(rows) <= most + 1 or len(rows) == SECONDS
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert rows[-1]["step"] == SECONDS - 1, "the newest is among them"
    assert ("loss_max" in rows[0]) == (span_s > 1)
    assert rows[0]["time"] == (span_s - 1) / 2


def test_what_is_rolled_up_hides_nothing(hour: JobFolder) -> None:
    assert max(row.get("loss_max", 0.0) for row in metrics_rows(hour, 58)) == 9.0


def test_without_roll_ups_rows_are_sampled(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    assert list(metrics_rows(job, 10)) == []
    for second in range(100):
        append_json_line(job.metrics, {"time": float(second)})
    assert 5 <= len(list(metrics_rows(job, 10))) <= 11


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
