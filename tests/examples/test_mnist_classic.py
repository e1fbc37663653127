"""The example of a program in the style of TensorFlow 1."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.digits import MNIST
from tests.harness.jobs import Completed

CLASSIC = MNIST.with_name("mnist_classic.py")
STEP = re.compile(r"^step (\d+), loss = \d+\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)$")


@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_two_ranks_learn_and_resume_from_their_checkpoint(launch, tmp_path: Path) -> None:
    # 4,000 digits in joint batches of 128: 32 steps in each epoch.
    assert _steps(_learn(launch, epochs=1)) == [10, 20, 30]
    assert len(list((tmp_path / "run").glob("events.out.*"))) == 1, "only the chief writes"
    done = _learn(launch, epochs=2)
    assert _steps(done) == [40, 50, 60]
    (accuracy,) = re.findall(r"^test accuracy = ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 0.93, done


def _learn(launch: Any, *, epochs: int) -> Completed:
    done = launch(2, CLASSIC, "--epochs", str(epochs), "--run-dir", "run", timeout_s=100)
    assert done.returncode == 0, done
    return done


def _steps(done: Completed) -> list[int]:
    return [int(match[1]) for line in done.stdout.splitlines() if (match := STEP.match(line))]
