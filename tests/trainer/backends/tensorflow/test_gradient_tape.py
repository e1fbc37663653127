"""Custom training loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain import DistributedGradientTape, broadcast_variables
from hvdtrain import world as job
from hvdtrain.errors import ModelError
from tests.trainer.equivalence import check_close

STEPS = 20
ROWS = 12  # of all ranks; 1, 2, 3 and 4 divide it

Gradient = Callable[[tf.GradientTape, tf.Tensor, list[Any]], list[Any]]


@pytest.fixture(autouse=True)
def _initialized(world) -> None:
    """Call ``hvdtrain.init()``."""


def _assert_alike(variables: list[Any]) -> None:
    own = [np.asarray(variable).tobytes().hex() for variable in variables]
    assert job.collectives().allgather_object(own) == [own] * job.size()


def _distributed(tape: tf.GradientTape, loss: tf.Tensor, sources: list[Any]) -> list[Any]:
    return DistributedGradientTape(tape).gradient(loss, sources)


def _plain(tape: tf.GradientTape, loss: tf.Tensor, sources: list[Any]) -> list[Any]:
    return tape.gradient(loss, sources)


def _regression(gradient: Gradient, share: slice, compiled: bool) -> list[np.ndarray]:
    """Train two layers in float64 by gradient descent with momentum."""
    generator = np.random.default_rng(3)
    x, y = generator.normal(size=(STEPS, ROWS, 5)), generator.normal(size=(STEPS, ROWS, 2))
    weights = [
        tf.Variable(generator.normal(size=shape), name=f"w{index}")
        for index, shape in enumerate([(5, 7), (7,), (7, 2)])
    ]
    velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.nn.tanh(inputs @ weights[0] + weights[1])
            loss = tf.reduce_mean((hidden @ weights[2] - targets) ** 2)
        for weight, velocity, slope in zip(weights, velocities, gradient(tape, loss, weights)):
            velocity.assign(0.9 * velocity - 0.05 * slope)
            weight.assign_add(velocity)

    run = tf.function(step) if compiled else step
    for index in range(STEPS):
        run(tf.constant(x[index, share]), tf.constant(y[index, share]))
    return [weight.numpy() for weight in weights]


def _own_rows() -> slice:
    rows = ROWS // job.size()
    return slice(rows * job.rank(), rows * (job.rank() + 1))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_a_loop_on_several_ranks_equals_one_process(compiled: bool) -> None:
    weights = _regression(_distributed, _own_rows(), compiled)
    reference = _regression(_plain, slice(None), compiled)
    for weight, right in zip(weights, reference):
        np.testing.assert_allclose(weight, right, rtol=1e-10, atol=1e-12)
    _assert_alike(weights)
    if job.size() > 1:
        alone = _regression(_plain, _own_rows(), compiled)
        difference = max(np.abs(a - b).max() for a, b in zip(alone, reference))
        assert difference > 1e-3, "the test would not detect a missing average"


def _classifier() -> keras.Model:
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(50, 6),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    # Adam has sparse updates of its state.
    model.optimizer = keras.optimizers.Adam(0.01)
    model.optimizer.build(model.trainable_variables)
    return model


def _train_classifier(gradient: Gradient, share: slice) -> list[np.ndarray]:
    generator = np.random.default_rng(4)
    x = generator.integers(0, 50, (STEPS, ROWS, 4)).astype("int32")
    y = generator.integers(0, 3, (STEPS, ROWS))
    model = _classifier()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kinds = set()

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        variables = [variable.value for variable in model.trainable_variables]
        gradients = gradient(tape, loss, variables)
        kinds.update(type(slope) for slope in gradients)
        model.optimizer.apply(gradients, model.trainable_variables)

    for index in range(STEPS):
        step(tf.constant(x[index, share]), tf.constant(y[index, share]))
    assert tf.IndexedSlices in kinds, "dense gradient of the embedding"
    return [np.asarray(variable) for variable in model.trainable_variables]


@pytest.mark.ranks(2)
def test_keras_optimizer_and_embedding() -> None:
    weights = _train_classifier(_distributed, _own_rows())
    reference = _train_classifier(_plain, slice(None))
    check_close(weights, reference)
    _assert_alike(weights)


@pytest.mark.ranks(1)
def test_all_tapes_have_the_same_class(world) -> None:
    """A loop creates a new tape in each step."""
    for wrap in (DistributedGradientTape, hvd.DistributedGradientTape):
        kinds = {type(wrap(tf.GradientTape())) for _ in range(3)}
        assert len(kinds) == 1
        nested = {type(wrap(wrap(tf.GradientTape()))) for _ in range(3)}
        assert len(nested) == 1
        assert all(issubclass(kind, tf.GradientTape) for kind in kinds | nested)


@pytest.mark.ranks(1, 2)
def test_contexts_and_nested_sources_and_persistent_tapes() -> None:
    rank_mean = (job.size() - 1) / 2
    factor = float(job.rank())
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        point = tf.constant(5.0)
        tape.watch(point)
        loss = factor * a * b + a * a + factor * point
    np.testing.assert_allclose(tape.gradient(loss, a), rank_mean * 3 + 4)
    np.testing.assert_allclose(tape.gradient(loss, point), rank_mean)
    nested = tape.gradient(loss, {"x": a, "y": [b, (point,)]})
    assert set(nested) == {"x", "y"}
    np.testing.assert_allclose(nested["y"][0], rank_mean * 2)
    np.testing.assert_allclose(nested["y"][1][0], rank_mean)
    assert tape.watched_variables() == (a, b)


@pytest.mark.ranks(2)
def test_unconnected_sources() -> None:
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as plain:
        loss = tf.reduce_sum(used) * (1.0 + job.rank())
    tape = DistributedGradientTape(plain)
    gradients = tape.gradient(loss, [used, unused])
    np.testing.assert_allclose(gradients[0], [1.5, 1.5])
    assert gradients[1] is None
    zeros = tape.gradient(loss, [unused], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_allclose(zeros[0], 0.0)
    weighted = tape.gradient(loss, [used], output_gradients=tf.constant(10.0))
    np.testing.assert_allclose(weighted[0], [15.0, 15.0])


@pytest.mark.ranks(1, 2)
def test_broadcasting_a_model_that_is_not_built_is_an_error() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ModelError, match=r"got no variables.*model\.build"):
        broadcast_variables(model.variables)


@pytest.mark.ranks(1, 2)
def test_broadcast_variables() -> None:
    for root in range(job.size()):
        variables = [
            tf.Variable(np.full((3, 2), job.rank() + 0.1), name="plain"),
            tf.Variable(job.rank(), name="counter"),
            tf.Variable(job.rank() == root, name="flag"),
            keras.Variable(np.full(5, job.rank()), dtype="float32", name="keras"),
            tf.Variable(tf.zeros([0, 3]), name="empty"),
        ]
        broadcast_variables(iter(variables), root)
        assert (variables[0].numpy() == root + 0.1).all()
        assert int(variables[1]) == root
        assert bool(variables[2])
        assert (np.asarray(variables[3]) == root).all()
        _assert_alike(variables)


@pytest.mark.ranks(1)
def test_the_tape_needs_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_world", dataclasses.replace(job._world, framework="torch"))
    with pytest.raises(ModelError, match=r"is for TensorFlow, .* devices for torch; use hvdtrain"):
        DistributedGradientTape(tf.GradientTape())
