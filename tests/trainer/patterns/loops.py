"""Custom training loops, as in "Writing a training loop from scratch", and ``train_on_batch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import hvdtrain
from tests.trainer.features import JOINT_BATCH, X, Y, classifier
from tests.trainer.own_steps import differentiate, minimize
from tests.trainer.patterns.layers import Watching
from tests.trainer.patterns.pattern import LOSS, NOISE, Pattern, stack
from tests.trainer.patterns.steps import make_gan


def _part(step: int, size: int) -> slice:
    """Return this rank's rows of a joint step, or all of them in one process."""
    first = step * JOINT_BATCH + (hvdtrain.rank() * size if size < JOINT_BATCH else 0)
    return slice(first, first + size)


def _batches(model: keras.Model, size: int) -> Any:
    """Train on this rank's part of each joint batch."""
    for step in range(2):
        rows = _part(step, size)
        model.train_on_batch(X[rows], Y[rows])
    return model.predict_on_batch(X[:3])


def _new_optimizer(size: int) -> Any:
    """Return an optimizer for a custom loop."""
    optimizer = keras.optimizers.Adam(0.01)
    return hvdtrain.DistributedOptimizer(optimizer) if size < JOINT_BATCH else optimizer


def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function if the backend can compile functions that change variables."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(step)
    return lambda *arrays: step(*map(keras.ops.convert_to_tensor, arrays))


def _compiled_loop(model: keras.Model, size: int) -> Any:
    """Train in a compiled function with the losses of layers, an optimizer and a metric."""
    optimizer = _new_optimizer(size)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @_compiled
    def step(x: Any, y: Any) -> Any:
        def losses() -> Any:
            logits = model(x, training=True)
            return LOSS(y, logits) + sum(model.losses), logits

        loss, logits = minimize(model, optimizer, model.trainable_weights, losses)
        accuracy.update_state(y, logits)
        return loss

    for number in range(4):
        rows = _part(number, size)
        step(X[rows], Y[rows])
    return model.predict_on_batch(X[:3])


def _two_loops(model: keras.Model, size: int) -> Any:
    """Train a GAN in a custom loop with ``apply_gradients``."""
    d_optimizer, g_optimizer = _new_optimizer(size), _new_optimizer(size)

    @_compiled
    def step(real: Any, noise: Any) -> None:
        for optimizer, network, losses in [
            (d_optimizer, model.critic, lambda: model.both_losses(real, noise)),
            (g_optimizer, model.generator, lambda: model.both_losses(real, noise)[1:]),
        ]:
            weights = network.trainable_weights
            _, gradients = differentiate(model, weights, losses)
            optimizer.apply_gradients(zip(gradients, weights))

    for number in range(4):
        rows = _part(number, size)
        step(X[rows], NOISE[rows])
    return model.generator.predict_on_batch(NOISE[:3])


def _watching() -> keras.Model:
    model = stack(keras.layers.Dense(4), Watching(), keras.layers.Dense(3))
    model.optimizer.build(model.trainable_variables)  # it is not used
    return model


LOOPS: dict[str, Pattern] = {
    "a compiled loop with the losses of layers": Pattern(_watching, _compiled_loop),
    "a GAN in a loop": Pattern(make_gan, _two_loops),
    "train_on_batch, predict_on_batch": Pattern(classifier, _batches, often=True),
}
