"""A real training under ``hvdtrain run`` that loses a rank and restarts."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import HVDTRAIN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

PROGRAM = REPOSITORY / "tests/trainer/saving/program.py"
MESSAGES = {
    "kill": ["rank 0 on", "failed first: killed by signal 9 (SIGKILL)", "lost: "],
    "kill nccl": ["rank 0 on", "failed first: killed by signal 9 (SIGKILL)", "NCCL combines"],
    "stop": ["stopped (state T)", "rank 0 waits in step", ": allreduce("],
    "preempt": ["received SIGUSR1; the checkpoint of step", "preempted"],
}
_uninterrupted: list[str] = []


@pytest.fixture
def train(run_command: Any, tmp_path: Path, forked_python: list[str]) -> Any:
    """Return a function that runs the program and returns its stdout and stderr."""

    def run(*options: str, fault: str = "", fresh: bool = False) -> tuple[str, str]:
        python = ["python"] if fresh else forked_python
        program = [*python, str(PROGRAM), str(tmp_path / "runs")]
        faults = ["--fault", fault] if fault else []
        done = run_command([*HVDTRAIN, *options, "--", *program, *faults], timeout_s=280)
        assert done.returncode == 0, done
        return done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    "fault", [pytest.param("kill", marks=pytest.mark.essential), "kill nccl", "stop", "preempt"]
)
def test_a_training_restarts(train, fault, tmp_path):
    stdout, stderr = train(
        *("-np", "2", "--max-restarts", "1", "--hang-timeout-s", "5", "--grace-s", "2"),
        *("--backend", "nccl" if "nccl" in fault else "mpi"),
        fault=fault.split()[0],
        # The launcher can't detect that a fork is stopped.
        fresh=fault == "stop",
    )
    for text in (*MESSAGES[fault], "attempt 2", "resuming from the checkpoint of step"):
        assert text in stderr, stderr
    steps, times, waits = stderr.split("hvdtrain run: ")[-4:-1]
    assert re.fullmatch(
        r"\d+ steps in .*; [\d.]+ steps/s, [\d,]+ samples/s during training\n", steps
    )
    assert re.match(r"time: \d+% in steps that count, .*\d+% start", times)
    assert waits.startswith("ranks waited ")
    if not _uninterrupted:
        (tmp_path / "runs").rename(tmp_path / "before")
        _uninterrupted.append(train("-np", "2")[0])
    assert stdout == _uninterrupted[0]


WRITING = """
import os, signal, sys, time
from pathlib import Path
import keras, numpy as np
import hvdtrain
from hvdtrain.checkpoint import files

hvdtrain.init()
folder = Path(sys.argv[1])
is_fresh = not folder.exists()
sync = files.sync
files.sync = lambda path: (time.sleep(0.5), sync(path))

class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and hvdtrain.rank() == 1 and is_fresh:
            while not list(folder.glob(".writing*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hvdtrain.distribute(model)
callbacks = [Fault(), hvdtrain.Checkpoint(folder, every_steps=2)]
model.fit(np.ones([32, 4]), np.ones([32, 1]), batch_size=4, verbose=0, callbacks=callbacks)
"""


def test_a_checkpoint_in_progress_is_completed(run_command, tmp_path, forked_python) -> None:
    """All other ranks end at once, although Checkpoint catches SIGTERM."""
    (tmp_path / "writing.py").write_text(WRITING)
    options = ("-np", "2", "--backend", "nccl", "--max-restarts", "1", "--grace-s", "600")
    program = [*forked_python, str(tmp_path / "writing.py"), str(tmp_path / "runs")]
    done = run_command([*HVDTRAIN, *options, "--", *program], timeout_s=120)
    assert done.returncode == 0, done
    assert "attempt 2 of 2 starts now" in done.stderr
    assert "resuming from the checkpoint of step 2 " in done.stderr


LOST = """
import os, signal, sys, time
import tensorflow as tf
import hvdtrain
from hvdtrain import world

signal.signal(signal.SIGTERM, lambda *_: None)  # Python can't run it within an operation
hvdtrain.init()
reduce = tf.function(lambda x: world.device_collectives().allreduce([x], "sum", name="x"))
reduce(tf.ones(3))
if hvdtrain.rank() == 1:
    time.sleep(1)
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "computes":
    tf.queue.FIFOQueue(1, tf.float32).dequeue()
reduce(tf.ones(3))
"""


@pytest.mark.parametrize("state", ["computes", "reduces"])
def test_ranks_end_soon_after_a_loss(run_command, tmp_path, forked_python, state: str) -> None:
    (tmp_path / "lost.py").write_text(LOST)
    argv = [*HVDTRAIN, "-np", "2", "--backend", "nccl", "--", *forked_python]
    done = run_command([*argv, str(tmp_path / "lost.py"), state], timeout_s=90)
    assert done.returncode == 137, done
    [killed] = re.findall(r"killed at ([\d.]+)", done.stdout)
    # Without load it is 7 s. The time-out of collectives is 100 s or more.
    assert time.time() - float(killed) < 30, done
