"""Jobs that are killed and started again.

tests/launch/test_real_training.py does the same with ``hvdtrain run``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.samples import saved_steps

PROGRAM = Path(__file__).with_name("program.py")
TIMEOUT_S = 240
_killed: list[Path] = []


@pytest.fixture
def killed(launch: Any, tmp_path: Path, tmp_path_factory: Any) -> Path:
    """Return the checkpoints of a job of two ranks that was killed in its first epoch."""
    if not _killed:
        directory = tmp_path_factory.mktemp("killed")
        done = launch(2, PROGRAM, str(directory), "--fault", "kill", timeout_s=TIMEOUT_S)
        assert done.returncode != 0, done.stderr
        _killed.append(directory)
    copy = tmp_path / "runs"
    shutil.copytree(_killed[0], copy)
    return copy


@pytest.fixture
def finish(launch: Any) -> Callable[[int | None, Path], str]:
    """Run the training to its end, and check that each epoch has used each sample once."""

    def run(ranks: int | None, directory: Path) -> str:
        done = launch(ranks, PROGRAM, str(directory), timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        text = str(done.stdout)
        assert "least [1.0, 1.0, 1.0]" in text
        assert "most [1.0, 1.0, 1.0]" in text
        return text

    return run


def test_a_killed_job_resumes_exactly(killed, finish, tmp_path):
    assert finish(2, killed) == finish(2, tmp_path / "whole")


@pytest.mark.parametrize("ranks", [None, 3])
def test_resuming_on_a_different_number_of_ranks_uses_each_sample_once(killed, finish, ranks):
    finish(ranks, killed)


def test_a_damaged_checkpoint_is_logged_and_the_previous_one_is_used(killed, launch):
    before, newest = saved_steps(killed)[-2:]
    folder = killed / f"step-{newest:08d}"
    with (folder / "model.safetensors").open("rb+") as file:
        file.truncate(100)
    done = launch(2, PROGRAM, str(killed), timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stderr
    assert f"resuming from the checkpoint of step {before} " in done.stderr


def test_a_directory_of_damaged_checkpoints_is_an_error_on_every_rank(killed, launch):
    for folder in killed.glob("step-*"):
        (folder / "state.json").write_text("{}")
    done = launch(2, PROGRAM, str(killed), timeout_s=TIMEOUT_S)
    assert done.returncode == 1
    assert "hvdtrain: rank 0 of 2 failed: CheckpointError" in done.stderr
    assert "hvdtrain: rank 1 of 2 failed: CheckpointError" in done.stderr
