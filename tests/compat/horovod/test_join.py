"""``join`` for ranks that run out of data in a custom training loop."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd

several = pytest.mark.ranks(1, 3)


@several
@pytest.mark.parametrize("first_rank_joins_first", [True, False])
def test_training_on_uneven_data(world, in_mode, first_rank_joins_first):
    """One rank starts without data."""
    size = hvd.size()
    order = range(size) if first_rank_joins_first else range(size)[::-1]
    steps = list(order).index(hvd.rank()) * 2
    weight, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))

    def step():
        with tf.GradientTape() as tape:
            dense = tf.reduce_sum(weight) * (hvd.rank() + 1.0)
            loss = dense + tf.reduce_sum(tf.square(table)) * 0.5
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [weight, table])
        for variable, gradient in zip([weight, table], gradients):
            variable.assign_sub(0.1 * gradient)

    run = in_mode(step)
    expected, rows = np.array([1.0, 2.0]), 1.0
    for number in range(2 * (size - 1)):
        active = [rank for position, rank in enumerate(order) if 2 * position > number]
        expected = expected - 0.1 * sum(rank + 1 for rank in active) / size
        rows = rows - 0.1 * rows * len(active) / size
        if number < steps:
            run()
            np.testing.assert_allclose(weight, expected, rtol=1e-5)
    last = hvd.join()
    assert (last.dtype, last.shape) == (tf.int32, [])
    assert int(last) == order[-1]
    hvd.broadcast_variables([weight, table], int(last))
    np.testing.assert_allclose(weight, expected, rtol=1e-5)
    np.testing.assert_allclose(table, np.full([4, 2], rows), rtol=1e-5)


@several
def test_join_may_be_called_again(world, in_mode):
    join = in_mode(hvd.join)
    for _ in range(3):
        assert int(join()) == hvd.size() - 1
    total = hvd.allreduce(tf.ones(3), op=hvd.Sum)
    np.testing.assert_array_equal(total, np.full(3, hvd.size()))
