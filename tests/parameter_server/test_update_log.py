"""What is counted and written down of gradients, as NumPy would count it; training survives
without the file.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.parameter_server.update_log import Origin, StalenessStats, UpdateLog


def note(log, version):
    log.update(version, [Origin(1, 4, 2, 8.0)], staleness=0, learning_rate=0.5, factor=1.0)


def test_updates_of_several_fits(tmp_path):
    path = tmp_path / "new" / "folder" / "server-3.jsonl"
    for fit in range(2):
        with UpdateLog(path, {"server": 3, "fit": fit}) as log:
            note(log, 3)
    gradients = [{"worker": 1, "step": 4, "version": 2, "weight": 8.0}]
    update = {
        "version": 3,
        "staleness": 0,
        "learning_rate": 0.5,
        "factor": 1.0,
        "gradients": gradients,
    }
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"server": 3, "fit": 0}, update, {"server": 3, "fit": 1}, update]


def test_log_that_cannot_be_opened(tmp_path, capsys):
    (tmp_path / "file").touch()
    with UpdateLog(tmp_path / "file" / "server-3.jsonl", {}) as log:
        note(log, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "can't write updates to" in line
    assert "server-3.jsonl: File exists. Training goes on without." in line


@pytest.mark.parametrize("updates", [1, 500])
def test_full_disk(capsys, updates):
    """It may be seen at the end only, when the buffer is written."""
    with UpdateLog(Path("/dev/full"), {}) as log:
        for version in range(updates):
            note(log, version)
    (line,) = capsys.readouterr().err.splitlines()
    assert "/dev/full: No space left on device. Training goes on without." in line


def counted(staleness):
    counts = StalenessStats()
    for value in staleness:
        counts.update(int(value))
    return counts


@pytest.mark.parametrize("size", [1, 2, 7, 20, 100, 999])
def test_mean_and_percentiles(size):
    staleness = np.random.default_rng(size).poisson(3, size)
    counts = counted(staleness)
    assert counts.updates == size
    assert counts.mean_staleness == pytest.approx(staleness.mean())
    for percent in (0, 1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100):
        expected = np.percentile(staleness, percent, method="inverted_cdf")
        assert counts.percentile_of_staleness(percent) == expected, percent


def test_no_updates():
    assert StalenessStats().mean_staleness == 0
    assert StalenessStats().percentile_of_staleness(95) == 0


def test_json():
    counts = counted([0, 4, 4, 1])
    counts.taken, counts.late = 4, 2
    counts.pushed.update({0: 4, 3: 2})
    back = StalenessStats.from_json(json.loads(json.dumps(counts.to_json())))
    assert back == counts
    assert back.staleness == {0: 1, 1: 1, 4: 2}
    assert back.pushed == {0: 4, 3: 2}
    assert (
        StalenessStats.from_json(json.loads(json.dumps(StalenessStats().to_json())))
        == StalenessStats()
    )
