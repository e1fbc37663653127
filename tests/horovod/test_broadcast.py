"""Variables and objects from one rank to all."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd

several = pytest.mark.ranks(1, 3)
WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])


@several
@WAYS
def test_variables_of_one_rank(world, compiled):
    """In a tf.function as in scripts that do it after the first step, which makes some of them."""
    root = hvd.size() - 1
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    if hvd.rank() == root:
        keras.layers.Dense(1)  # as where a rank has loaded a model before
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    for variable in layer.variables:
        variable.assign(np.full(variable.shape, hvd.rank() + 1.0))
    counter = tf.Variable(hvd.rank(), dtype=tf.int64)
    small = tf.Variable([hvd.rank() + 0.5], dtype=tf.bfloat16)

    def step(first):
        optimizer.apply([v * (hvd.rank() + 1.0) for v in layer.variables], layer.variables)
        if first:
            hvd.broadcast_variables([*layer.variables, counter, small], root_rank=root)
            hvd.broadcast_variables(optimizer.variables, root_rank=root)

    (tf.function(step) if compiled else step)(True)
    wanted = (root + 1) - 0.5 * (root + 1) ** 2
    for variable in layer.variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, wanted))
    assert int(counter) == root
    assert float(tf.cast(small, tf.float32)[0]) == root + 0.5
    velocity = next(v for v in optimizer.variables if v.shape == (3, 2))
    np.testing.assert_allclose(velocity.numpy(), np.full((3, 2), -0.5 * (root + 1) ** 2))


@several
def test_objects(world):
    root = hvd.size() - 1
    mine = {"rank": hvd.rank(), "set": {1, 2}}
    assert hvd.broadcast_object(mine, root) == {"rank": root, "set": {1, 2}}
    assert hvd.broadcast_object_fn(root)(mine)["rank"] == root
    assert [entry["rank"] for entry in hvd.allgather_object(mine)] == list(range(hvd.size()))
