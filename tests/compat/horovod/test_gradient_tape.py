"""Distributed gradient tapes of the Horovod API, and their options."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd

several = pytest.mark.ranks(1, 3)


def record(variables, **options):
    """Return a tape and a loss with the gradients rank + 1, 2 (rank + 1), ..."""
    with tf.GradientTape() as tape:
        losses = [(n + 1.0) * tf.reduce_sum(v) for n, v in enumerate(variables)]
        loss = tf.add_n(losses) * (hvd.rank() + 1.0)
    return hvd.DistributedGradientTape(tape, **options), loss


def rank_sum() -> float:
    """Return the sum of rank + 1."""
    return sum(range(1, hvd.size() + 1))


@several
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": hvd.Sum},
        {"op": hvd.Max},
        {"gradient_predivide_factor": 4.0},
        {"compression": hvd.Compression.bf16},
        {"num_groups": 2},
        {"groups": 7},
        {"groups": "lists"},
    ],
    ids=str,
)
def test_gradients_of_all_ranks(world, options, in_mode):
    variables = [tf.Variable(tf.ones(n + 1)) for n in range(4)]
    if options.get("groups") == "lists":
        options = {"groups": [[variables[2], variables[0]], [variables[3]]]}

    def step():
        tape, loss = record(variables, **options)
        return tape.gradient(loss, variables)

    gradients = in_mode(step)()
    combined = {hvd.Sum: rank_sum(), hvd.Max: hvd.size()}.get(
        options.get("op"), rank_sum() / hvd.size()
    )
    for n, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, np.full(n + 1, (n + 1) * combined), rtol=1e-6)


@several
@pytest.mark.parametrize("as_dense", [False, True])
def test_indexed_slices(world, as_dense):
    table = tf.Variable(tf.ones([4, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3])) * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense, op=hvd.Sum)
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices) == (not as_dense)
    expected = np.zeros((4, 2))
    for rank in range(hvd.size()):
        expected[rank] += rank + 1
        expected[3] += rank + 1
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected)


@several
@pytest.mark.parametrize("scaled", [True, False])
def test_local_layers(world, scaled, in_mode):
    shared, local = keras.layers.Dense(2), keras.layers.Dense(1)
    x = tf.ones([1, 3])
    local(shared(x))
    shared.set_weights([np.ones((3, 2)), np.zeros(2)])
    local.set_weights([np.ones((2, 1)), np.zeros(1)])
    sources = [*shared.trainable_weights, *local.trainable_weights]
    local_paths = []

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(local(shared(x))) * (hvd.rank() + 1.0)
        tape = hvd.PartialDistributedGradientTape(
            tape, local_layers=local, scale_local_gradients=scaled
        )
        local_pairs, global_pairs = tape.get_local_and_global_gradients(loss, sources)
        local_paths[:] = [source.path for source, _ in local_pairs]
        return [gradient for _, gradient in local_pairs + global_pairs]

    gradients = in_mode(step)()
    local_factor = (hvd.rank() + 1.0) / (hvd.size() if scaled else 1)
    assert local_paths == [v.path for v in local.trainable_weights]
    np.testing.assert_allclose(gradients[0], np.full((2, 1), 3.0 * local_factor), rtol=1e-6)
    np.testing.assert_allclose(gradients[2], np.full((3, 2), rank_sum() / hvd.size()), rtol=1e-6)


def test_contradicting_arguments(world):
    tape = tf.GradientTape()
    with pytest.raises(ValueError, match="requires op=Average, got op=Sum"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    for groups in (-1, 0, "all"):
        with pytest.raises(ValueError, match="groups must be a positive number"):
            hvd.DistributedGradientTape(tape, groups=groups)
    with pytest.raises(ValueError, match="local_layers must be Keras layers, got str"):
        hvd.PartialDistributedGradientTape(tape, local_layers=["dense"])
