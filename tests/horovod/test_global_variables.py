"""The start of ranks that train in sessions, new or from a checkpoint of the chief."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.errors import ModelError

v1 = tf.compat.v1
RATE = 0.125


def _train(last_step: int, folder: Path) -> tuple[int, np.ndarray]:
    """A global step and a weight after ``last_step``, whose gradient is what a rank has read."""
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        # Each rank begins with a weight of its own.
        weight = v1.get_variable("weight", initializer=np.full(3, hvd.rank() + 1, np.float32))
        read = tf.cast(step, tf.float32) + hvd.rank()
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(RATE))
        train = optimizer.minimize(tf.reduce_sum(weight * read), step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last_step)]
        chief = hvd.rank() == 0
        found: Any = None
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder) if chief else None, hooks=hooks
        ) as session:
            while not session.should_stop():
                session.run(train)
                found = session.run([step, weight]) if not session.should_stop() else found
        return found


@pytest.mark.ranks(2)
def test_training_goes_on_from_the_chiefs_checkpoint(world, tmp_path: Path) -> None:
    _train(3, tmp_path)
    assert (tmp_path / "checkpoint").exists() == (hvd.rank() == 0)
    step, weight = _train(7, tmp_path)
    assert step == 6
    # From the chief's 1, over the steps 0 to 5, in each of which the ranks read n and n + 1.
    expected = 1 - RATE * sum(n + 0.5 for n in range(6))
    assert weight.tolist() == [expected] * 3


@pytest.mark.ranks(2)
def test_all_global_variables_are_broadcast(world) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        names = ["a", "b", "c"]
        made = [v1.get_variable(n, initializer=10.0 * hvd.rank() + k) for k, n in enumerate(names)]
        session.run(v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(1))
        assert session.run(made) == [10.0, 11.0, 12.0]


@pytest.mark.ranks(1, 2)
def test_eagerly_there_is_no_list_of_variables(world) -> None:
    with pytest.raises(ModelError, match=r"Use broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_an_error_beside_a_monitored_session_ends_all_ranks(launch) -> None:
    """And the rank that waits in its session says whose it is."""
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
