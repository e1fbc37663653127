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
_killed: dict[str, Path] = {}


@pytest.fixture
def start(run_command: Any, mpirun: Any, python_with: Any) -> Callable[..., Any]:
    """Run the training with a backend of Keras."""

    def run(backend: str, ranks: int | None, *arguments: str) -> Any:
        program = [*python_with(backend), str(PROGRAM), *arguments]
        command = program if ranks is None else mpirun(ranks, program)
        return run_command(command, env={"KERAS_BACKEND": backend}, timeout_s=TIMEOUT_S)

    return run


@pytest.fixture
def kill(start: Any, tmp_path: Path, tmp_path_factory: Any) -> Callable[[str], Path]:
    """Return the checkpoints of a job of two ranks that was killed in its first epoch."""

    def run(backend: str) -> Path:
        if backend not in _killed:
            directory = tmp_path_factory.mktemp("killed")
            done = start(backend, 2, str(directory), "--fault", "kill")
            assert done.returncode != 0, done.stderr
            _killed[backend] = directory
        copy = tmp_path / "runs"
        shutil.copytree(_killed[backend], copy)
        return copy

    return run


@pytest.fixture
def killed(kill: Any) -> Path:
    """Return the checkpoints of a killed job that trained on TensorFlow."""
    return kill("tensorflow")


@pytest.fixture
def finish(start: Any) -> Callable[..., Any]:
    """Run the training to its end, and check that each epoch has used each sample once."""

    def run(ranks: int | None, directory: Path, backend: str = "tensorflow") -> Any:
        done = start(backend, ranks, str(directory))
        assert done.returncode == 0, done.stderr
        assert "least [1.0, 1.0, 1.0]" in done.stdout
        assert "most [1.0, 1.0, 1.0]" in done.stdout
        return done

    return run


def test_a_killed_job_resumes_exactly(killed, finish, tmp_path):
    resumed = finish(2, killed)
    assert "resuming from the checkpoint of step" in resumed.stderr
    assert resumed.stdout == finish(2, tmp_path / "whole").stdout


@pytest.mark.parametrize(
    ("before", "after", "ignored"),
    [
        ("tensorflow", "torch", "ignored: tensorflow, tensorflow seed."),
        ("jax", "tensorflow", None),
    ],
)
def test_resuming_on_a_different_backend_uses_each_sample_once(
    kill, finish, before, after, ignored
):
    resumed = finish(3, kill(before), after)
    assert resumed.stderr.count("random states in it are ignored") == (ignored is not None)
    assert ignored is None or ignored in resumed.stderr


def test_a_damaged_checkpoint_is_logged_and_the_previous_one_is_used(killed, finish):
    """A single process resumes and uses each sample once."""
    before, newest = saved_steps(killed)[-2:]
    folder = killed / f"step-{newest:08d}"
    with (folder / "model.safetensors").open("rb+") as file:
        file.truncate(100)
    resumed = finish(None, killed)
    assert str(folder) in resumed.stderr
    assert f"resuming from the checkpoint of step {before} " in resumed.stderr


def test_a_directory_of_damaged_checkpoints_is_an_error_on_every_rank(killed, launch):
    for folder in killed.glob("step-*"):
        (folder / "state.json").write_text("{}")
    done = launch(2, PROGRAM, str(killed), timeout_s=TIMEOUT_S)
    assert done.returncode == 1
    assert "hvdtrain: rank 0 of 2 failed: CheckpointError" in done.stderr
    assert "hvdtrain: rank 1 of 2 failed: CheckpointError" in done.stderr
