from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.json_lines import append_json_line
from hvdtrain.jobs.metrics_rows import metrics_rows
from hvdtrain.jobs.roll_up import RollUp

SECONDS = 3600


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobFolder:
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
def test_the_coarsest_that_has_enough_is_read(job: JobFolder, most: int, span_s: int) -> None:
    rows = list(metrics_rows(job, most))
    assert most / 2 <= len(rows) <= most + 1 or len(rows) == SECONDS
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert rows[-1]["step"] == SECONDS - 1, "the newest is among them"
    assert ("loss_max" in rows[0]) == (span_s > 1)
    assert rows[0]["time"] == (span_s - 1) / 2


def test_what_is_rolled_up_hides_nothing(job: JobFolder) -> None:
    assert max(row.get("loss_max", 0.0) for row in metrics_rows(job, 58)) == 9.0


def test_without_roll_ups_rows_are_sampled(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    assert list(metrics_rows(job, 10)) == []
    for second in range(100):
        append_json_line(job.metrics, {"time": float(second)})
    assert 5 <= len(list(metrics_rows(job, 10))) <= 11
