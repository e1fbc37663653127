"""Elastic jobs: custom training loops after a loss, and errors for unsupported uses."""

from __future__ import annotations

import pytest

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

# A single process with the samples of the remaining ranks in each step.
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

REFUSED = """
import keras, numpy as np, tensorflow as tf
import hvdtrain

hvdtrain.init()
x, y = np.zeros((24, 4), "float32"), np.zeros((24, 1), "float32")

def model_of(loss="mse", **layer):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, **layer)])
    model.compile("sgd", loss)
    return model

def refused(make):
    try:
        make()
    except hvdtrain.HvdtrainError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    else:
        print("no error", flush=True)

refused(lambda: hvdtrain.distribute(model_of(), presharded=True))
pipeline = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24).shuffle(24).batch(4)
refused(lambda: hvdtrain.distribute(model_of()).fit(pipeline, verbose=0))
summed = keras.losses.MeanSquaredError(reduction="sum")
regularized = model_of(summed, kernel_regularizer="l2")
refused(lambda: hvdtrain.distribute(regularized).fit(x, y, batch_size=4, verbose=0))
"""


@pytest.mark.parametrize("dies", [0, 1])
def test_remaining_ranks_train_like_a_smaller_job(elastic, dies):
    done = elastic(LOOP, arguments=(str(dies),))
    assert done.returncode == 0, done
    left = [rank for rank in range(3) if rank != dies]
    for now, rank in enumerate(left):
        assert f"rank {rank} is now {now} of 2" in done.stdout
    assert f"rank {dies} on" in done.stderr
    assert "2 ranks continue" in done.stderr


def test_unsupported_uses_are_refused_on_every_rank(elastic):
    done = elastic(REFUSED)
    assert done.returncode == 0, done
    assert done.stdout.count("ModelError: In an elastic job") == 6, done
    assert done.stdout.count("must receive the whole data") == 3
    assert done.stdout.count("DataError: An elastic job") == 3, done
    assert done.stdout.count("reshuffle_each_iteration=False") == 3
    assert done.stdout.count("reduction='sum' and regularization") == 3, done
    assert "no error" not in done.stdout


STARTING = """
import os, signal, sys
import pathlib
import hvdtrain

first_time = pathlib.Path(sys.argv[1])
if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and not first_time.exists():
    first_time.touch()
    os.kill(os.getpid(), signal.SIGKILL)
hvdtrain.init()
print("rank", hvdtrain.rank(), "of", hvdtrain.size())
"""


def test_a_rank_lost_during_the_start_ends_the_attempt(elastic, tmp_path):
    done = elastic(STARTING, "--max-restarts", "1", arguments=(str(tmp_path / "once"),))
    assert done.returncode == 0, done
    assert "rank 1 on" in done.stderr
    assert "continue" not in done.stderr, "impossible before MPI has started"
    assert "attempt 2 of 2" in done.stderr
    assert done.stdout.count("of 3") == 3
