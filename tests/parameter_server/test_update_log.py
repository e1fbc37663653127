"""The file of a server's updates: what it holds, and that training survives without it."""

import json
from pathlib import Path

import pytest

from hvdtrain.parameter_server.update_log import Origin, UpdateLog


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
