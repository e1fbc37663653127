"""Training in an elastic job: loops of one's own go on when a rank dies; fit says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import HVDTRAIN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

LOOP = """
import os, signal, sys
import keras, numpy as np, tensorflow as tf
import hvdtrain

hvdtrain.init()
first_rank, dies, steps = hvdtrain.rank(), int(sys.argv[1]), 12
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
hvdtrain.broadcast_variables(model.variables)
x = np.random.default_rng(1).normal(size=(steps, 3, 5, 4)).astype("float32")
for step in range(steps):
    if step == 6 and first_rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x[step, first_rank], training=True) ** 2)
    tape = hvdtrain.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)

# What one process makes of the samples of the ranks that there were in each step.
keras.utils.set_random_seed(3)
alone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
plain = keras.optimizers.SGD(0.1)
for step in range(steps):
    there = [rank for rank in range(3) if step < 6 or rank != dies]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(alone(np.concatenate(x[step, there]), training=True) ** 2)
    plain.apply(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables)
for one, other in zip(model.get_weights(), alone.get_weights()):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
print("rank", first_rank, "is now", hvdtrain.rank(), "of", hvdtrain.size())
"""

FIT = """
import keras
import hvdtrain

hvdtrain.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hvdtrain.distribute(model)
"""


@pytest.fixture
def elastic(run_command: Any, tmp_path: Path) -> Any:
    def run(text: str, *options: str, arguments: tuple[str, ...] = ()) -> Any:
        path = tmp_path / "program.py"
        path.write_text(text)
        program = [sys.executable, str(path), *arguments]
        command = [*HVDTRAIN, "-np", "3", "--elastic", "--grace-s", "2", *options]
        return run_command([*command, "--", *program], timeout_s=200)

    return run


@pytest.mark.parametrize("dies", [0, 1])
def test_the_others_go_on_as_if_there_had_been_fewer_from_that_step_on(elastic, dies):
    done = elastic(LOOP, arguments=(str(dies),))
    assert done.returncode == 0, done
    left = [rank for rank in range(3) if rank != dies]
    for now, rank in enumerate(left):
        assert f"rank {rank} is now {now} of 2" in done.stdout
    assert f"rank {dies} on" in done.stderr
    assert "2 ranks go on" in done.stderr


def test_with_too_few_ranks_left_the_job_ends(elastic):
    done = elastic(LOOP, "--min-np", "3", "--preempt-grace-s", "20", arguments=("1",))
    assert done.returncode == 137, done
    assert "rank 1 on" in done.stderr
    assert "2 ranks left: too few" in done.stderr
    assert "is now" not in done.stdout, "the others end, too"


def test_fit_says_what_to_do_instead(elastic):
    done = elastic(FIT)
    assert done.returncode == 1, done
    assert "ModelError: This job was started with --elastic" in done.stderr
    assert "hvdtrain.Checkpoint" in done.stderr
