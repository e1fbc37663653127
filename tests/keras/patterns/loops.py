"""Guide "Writing a training loop from scratch in TensorFlow", and batches by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from tests.keras.features import JOINT_BATCH, X, Y, classifier
from tests.keras.patterns.layers import Watching
from tests.keras.patterns.pattern import LOSS, NOISE, Pattern, stack
from tests.keras.patterns.steps import make_gan

__all__ = ["LOOPS"]


def _part(step: int, size: int) -> slice:
    """The rows of a step that this rank, or one process, computes."""
    first = step * JOINT_BATCH + (hvdtrain.rank() * size if size < JOINT_BATCH else 0)
    return slice(first, first + size)


def _batches(model: keras.Model, size: int) -> Any:
    """train_on_batch and test_on_batch on this rank's part of each joint batch."""
    told: list[Any] = []
    for step in range(2):
        rows = _part(step, size)
        model.train_on_batch(X[rows], Y[rows])
    told.append(model.predict_on_batch(X[:3]))
    return np.concatenate(told)


def _own_loop(model: keras.Model, size: int) -> Any:
    """A custom training loop; each rank computes its part of a joint batch."""
    averages = size < JOINT_BATCH
    for step in range(2):
        rows = _part(step, size)
        with tf.GradientTape() as tape:
            loss = LOSS(Y[rows], model(X[rows], training=True))
        if averages:
            tape = hvdtrain.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_weights)
        for gradient, weight in zip(gradients, model.trainable_weights):
            weight.assign_sub(0.1 * gradient)
    return model.predict_on_batch(X[:3])


def _new_optimizer(size: int) -> Any:
    """One made beside the model, as for a loop of one's own."""
    optimizer = keras.optimizers.Adam(0.01)
    return hvdtrain.DistributedOptimizer(optimizer) if size < JOINT_BATCH else optimizer


def _compiled_loop(model: keras.Model, size: int) -> Any:
    """A tf.function with the losses of layers, an optimizer and a metric of its own."""
    optimizer = _new_optimizer(size)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = LOSS(y, logits) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(y, logits)
        return loss

    for number in range(4):
        rows = _part(number, size)
        step(X[rows], Y[rows])
    return model.predict_on_batch(X[:3])


def _two_loops(model: keras.Model, size: int) -> Any:
    """A GAN in a loop of one's own; the optimizers are given zipped pairs, as of old."""
    d_optimizer, g_optimizer = _new_optimizer(size), _new_optimizer(size)

    @tf.function
    def step(real: Any, noise: Any) -> None:
        for optimizer, network, number in [
            (d_optimizer, model.critic, 0),
            (g_optimizer, model.generator, 1),
        ]:
            with tf.GradientTape() as tape:
                loss = model._both_losses(real, noise)[number]
            weights = network.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    for number in range(4):
        rows = _part(number, size)
        step(X[rows], NOISE[rows])
    return model.generator.predict_on_batch(NOISE[:3])


def _watching() -> keras.Model:
    model = stack(keras.layers.Dense(4), Watching(), keras.layers.Dense(3))
    model.optimizer.build(model.trainable_variables)  # it is not used
    return model


LOOP, API = "custom training loops", "API"

LOOPS: dict[str, Pattern] = {
    "a loop of one's own": Pattern(LOOP, classifier, _own_loop),
    "a compiled loop with the losses of layers": Pattern(LOOP, _watching, _compiled_loop),
    "a GAN in a loop": Pattern(LOOP, make_gan, _two_loops),
    "train_on_batch, predict_on_batch": Pattern(API, classifier, _batches),
}
