"""Broadcast of variables and objects, in scripts and in sessions of TensorFlow 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.errors import ModelError

v1 = tf.compat.v1
several = pytest.mark.ranks(1, 3)
RATE = 0.125


@several
def test_broadcast_variables(world, in_mode):
    """Scripts broadcast after the first step, which creates the optimizer's variables."""
    root = hvd.size() - 1
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    if hvd.rank() == root:
        keras.layers.Dense(1)  # automatic names then differ between ranks
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    for variable in layer.variables:
        variable.assign(np.full(variable.shape, hvd.rank() + 1.0))
    counter = tf.Variable(hvd.rank(), dtype=tf.int64)
    small = tf.Variable([hvd.rank() + 0.5], dtype=tf.bfloat16)

    def step():
        optimizer.apply([v * (hvd.rank() + 1.0) for v in layer.variables], layer.variables)
        hvd.broadcast_variables([*layer.variables, counter, small], root_rank=root)
        hvd.broadcast_variables(optimizer.variables, root_rank=root)

    in_mode(step)()
    expected = (root + 1) - 0.5 * (root + 1) ** 2
    for variable in layer.variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, expected))
    assert int(counter) == root
    assert float(tf.cast(small, tf.float32)[0]) == root + 0.5
    velocity = next(v for v in optimizer.variables if v.shape == (3, 2))
    np.testing.assert_allclose(velocity.numpy(), np.full((3, 2), -0.5 * (root + 1) ** 2))


@several
def test_objects(world):
    root = hvd.size() - 1
    obj = {"rank": hvd.rank(), "set": {1, 2}}
    assert hvd.broadcast_object(obj, root) == {"rank": root, "set": {1, 2}}
    assert hvd.broadcast_object_fn(root)(obj)["rank"] == root
    assert [entry["rank"] for entry in hvd.allgather_object(obj)] == list(range(hvd.size()))


def _train(last_step: int, folder: Path) -> tuple[int, np.ndarray]:
    """Train in a monitored session and return the global step and the weight.

    Each rank starts with a different weight, and its gradient is the step plus the rank.
    """
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        weight = v1.get_variable("weight", initializer=np.full(3, hvd.rank() + 1, np.float32))
        slope = tf.cast(step, tf.float32) + hvd.rank()
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(RATE))
        train = optimizer.minimize(tf.reduce_sum(weight * slope), step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last_step)]
        is_chief = hvd.rank() == 0
        result: Any = None
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder) if is_chief else None, hooks=hooks
        ) as session:
            while not session.should_stop():
                session.run(train)
                result = session.run([step, weight]) if not session.should_stop() else result
        return result


@pytest.mark.ranks(2)
def test_training_resumes_from_the_checkpoint_of_the_chief(world, tmp_path: Path) -> None:
    _train(3, tmp_path)
    assert (tmp_path / "checkpoint").exists() == (hvd.rank() == 0)
    step, weight = _train(7, tmp_path)
    assert step == 6
    # From the chief's weight 1, over steps 0 to 5 with a mean gradient of step + 0.5.
    assert weight.tolist() == [1 - RATE * sum(n + 0.5 for n in range(6))] * 3


@pytest.mark.ranks(2)
def test_broadcast_global_variables(world) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [
            v1.get_variable(name, initializer=10.0 * hvd.rank() + n) for n, name in enumerate("abc")
        ]
        session.run(v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(1))
        assert session.run(variables) == [10.0, 11.0, 12.0]
    with pytest.raises(ModelError, match=r"Use broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_an_error_outside_a_monitored_session_ends_all_ranks(launch) -> None:
    """The rank that waits in its session names the failed rank."""
    done = launch(
        2,
        """
        import tensorflow as tf
        import hvdtrain.tensorflow as hvd

        v1 = tf.compat.v1
        hvd.init()
        with tf.Graph().as_default():
            weight = v1.get_variable("weight", initializer=1.0)
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
            train = optimizer.minimize(weight, v1.train.get_or_create_global_step())
            with v1.train.MonitoredTrainingSession(
                hooks=[hvd.BroadcastGlobalVariablesHook(0)]
            ) as session:
                for step in range(100):
                    session.run(train)
                    if hvd.rank() == 1 and step == 3:
                        raise KeyError("no such digit")
        """,
        timeout_s=60,
    )
    assert done.returncode != 0
    assert "rank 1 of 2 failed: KeyError: 'no such digit'" in done.stderr, done
    assert "hvdtrain: rank 0 of 2 stops: rank 1 failed: KeyError: 'no such digit'" in done.stderr
