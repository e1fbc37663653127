"""Trains models on whole batches and in towers, and reports the differences.

``python oracle.py [CASE ...]`` prints a line of JSON for each case, on any number of ranks and with
the settings of the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain

JOINT_BATCH = 12
ROWS = JOINT_BATCH * 4 + 1  # most towers have no rows of the last joint batch

layers = keras.layers
losses = keras.losses
optimizers = keras.optimizers


def main(*chosen: str) -> None:
    hvdtrain.init()
    keras.config.set_floatx("float64")
    for case in chosen or CASES:
        line = json.dumps({"what": case, "rank": hvdtrain.rank(), **differences(case)})
        # Print each line in a single write, so that lines of several ranks are not mixed.
        os.write(1, (line + "\n").encode())


def differences(case: str) -> dict[str, float]:
    """Return the largest differences between plain Keras on joint batches and this job."""
    alone = results(case, JOINT_BATCH, eager)
    joint = results(case, JOINT_BATCH // hvdtrain.size(), hvdtrain.distribute)
    return {name: distance(joint[name], alone[name]) for name in alone}


def eager(model: keras.Model) -> keras.Model:
    """Let a model run eagerly, which is faster here than tracing it."""
    model.run_eagerly = True
    return model


def results(
    case: str, batch_size: int, distribute: Callable[[keras.Model], keras.Model]
) -> dict[str, list[np.ndarray]]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    model = distribute(CASES[case]())
    data = arguments(case)
    history = model.fit(**data, batch_size=batch_size, shuffle=False, epochs=2, verbose=0).history
    scores = model.evaluate(data["x"], data["y"], batch_size=7, verbose=0, return_dict=True)
    return {
        "weights": [np.asarray(variable.numpy()) for variable in model.variables],
        "history": [np.asarray(history[name]) for name in sorted(history)],
        "scores": [np.asarray(scores[name]) for name in sorted(scores)],
        "predictions": [model.predict(data["x"], batch_size=5, verbose=0)],
    }


def distance(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest difference, relative to the largest value of its array."""
    return max(
        float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
        for a, b in zip(actual, expected, strict=True)
    )


def arguments(case: str) -> dict[str, Any]:
    """Return the arguments of ``fit``."""
    rng = np.random.default_rng(11)
    y = rng.integers(0, 3, ROWS)
    if case == "embedding" or case == "masked":
        x = rng.integers(0, 9, (ROWS, 5))
        x[:, 0] = 1 + np.arange(ROWS) % 8  # no row is masked completely
        return {"x": x, "y": x if case == "masked" else y}
    given: dict[str, Any] = {"x": rng.normal(size=(ROWS, 6)), "y": y}
    if "sample weights" in case:
        given["sample_weight"] = rng.random(ROWS)
    return given


class AddsLoss(layers.Layer):
    """Adds the mean over the batch to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
        return x


class OwnLoss(keras.Sequential):
    """Computes a loss from a weight and from pairs of samples in the batch."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        between = tf.reduce_mean(tf.matmul(y_pred, y_pred, transpose_b=True))
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.01 * between + 0.1 * tf.reduce_sum(tf.square(self.layers[0].kernel))


class OwnSteps(keras.Sequential):
    """Overrides ``test_step`` and ``predict_step``."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        return self.compute_metrics(x, y, 2 * self(x, training=False))

    def predict_step(self, data: Any) -> Any:
        return 2 * self(data[0] if isinstance(data, tuple) else data, training=False)


def dense(optimizer: Any = "sgd", *, kind: type = keras.Sequential, **options: Any) -> keras.Model:
    regularized = layers.Dense(
        7, "tanh", kernel_regularizer=keras.regularizers.L2(0.01), activity_regularizer="l2"
    )
    model = kind([keras.Input((6,)), regularized, AddsLoss(), layers.Dense(3)])
    return compiled(model, optimizer, **options)


def embedding() -> keras.Model:
    inner = [layers.Embedding(9, 6), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *inner])
    return compiled(model, optimizers.Adam(0.01))


def masked() -> keras.Model:
    inner = [layers.Embedding(9, 4, mask_zero=True), layers.Dense(9)]
    return compiled(keras.Sequential([keras.Input((5,), dtype="int32"), *inner]), "sgd")


def compiled(
    model: keras.Model, optimizer: Any, reduction: str = "sum_over_batch_size", **options: Any
) -> keras.Model:
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    options.setdefault("metrics", ["accuracy"])
    model.compile(optimizer, loss, **options)
    return model


def scaled() -> Any:
    # Adam would amplify the smallest difference in unscaling.
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=64.0)


# Each case has one or two features that can't hide an error in each other.
CASES: Mapping[str, Callable[[], keras.Model]] = {
    "clip and decay": lambda: dense(
        optimizers.AdamW(0.01, weight_decay=0.05, global_clipnorm=0.1), steps_per_execution=2
    ),
    "accumulation, sum": lambda: dense(
        optimizers.SGD(0.001, gradient_accumulation_steps=2), reduction="sum"
    ),
    "embedding": embedding,
    "masked": masked,
    "sample weights": lambda: dense(weighted_metrics=["accuracy"]),
    "mean of sample weights, eagerly": lambda: dense(
        reduction="mean_with_sample_weight", run_eagerly=True
    ),
    "own steps, loss scale": lambda: dense(scaled(), kind=OwnSteps),
    "own loss, momentum": lambda: dense(optimizers.SGD(0.05, momentum=0.9), kind=OwnLoss),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
