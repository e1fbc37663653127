"""A program that compares trainings in which a rank dies with a single process.

    elastic_reference.py FOLDER TRAININGS    (JSON: a list of [kind, rank that dies, step])

Every rank records the samples of each step. The single process trains on the samples of all
ranks, without those that the dead rank lost, as one batch.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain import world

ROWS, BATCH, EPOCHS = 53, 5, 2
_rng = np.random.default_rng(8)
X = _rng.normal(size=(ROWS, 6)).astype("float32")
Y = _rng.normal(size=ROWS).astype("float32")
WEIGHTS = _rng.uniform(0.2, 2.0, ROWS).astype("float32")


class OwnStep(keras.Sequential):
    """A custom train_step."""

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class TwoOptimizers(keras.Sequential):
    """A train_step with a separate optimizer for the first layer."""

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), training=True)
        first, last = (layer.trainable_variables for layer in self.layers)
        of_first, of_last = tape.gradient(loss, (first, last))
        self.optimizer.apply(of_last, last)
        self.of_first.apply(of_first, first)
        return {"loss": loss}


class Squares(keras.losses.Loss):
    """Squared errors for targets that include the index of the sample."""

    def __init__(self, reduction: str, notes: Path | None) -> None:
        super().__init__(reduction=reduction)
        self._notes = notes

    def call(self, y_true: Any, y_pred: Any) -> Any:
        errors = (y_true[:, 0] - y_pred[:, 0]) ** 2
        if self._notes is None:
            return errors
        with tf.control_dependencies([tf.numpy_function(self._note, [y_true[:, 1]], [])]):
            return tf.identity(errors)

    def _note(self, numbers: np.ndarray) -> None:
        assert self._notes is not None
        with self._notes.open("a") as file:
            file.write(json.dumps([int(number) for number in numbers]) + "\n")


class Die(keras.callbacks.Callback):
    """Kills this process before a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def optimizer_of(kind: str) -> keras.optimizers.Optimizer:
    """Return an optimizer. It is mostly SGD, because Adam hides a constant factor in gradients."""
    momentum = functools.partial(keras.optimizers.SGD, momentum=0.9)
    if kind == "weights":
        return momentum(0.05, clipnorm=0.5)
    if kind == "sum":
        return momentum(0.002)
    if kind == "scaled rate":
        return momentum(hvdtrain.scale_learning_rate(0.01))
    if kind == "accumulating":
        return momentum(0.02, gradient_accumulation_steps=2)
    if kind == "two optimizers":
        return keras.optimizers.Adam(0.01)
    return momentum(0.02)


def model_of(kind: str, notes: Path | None) -> keras.Model:
    """Return a compiled model, always with the same weights."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    classes = {"own step": OwnStep, "two optimizers": TwoOptimizers}
    model = classes.get(kind, keras.Sequential)(layers)
    if kind == "two optimizers":
        model.of_first = keras.optimizers.SGD(0.05, momentum=0.9)
    reduction = {"weights": "mean_with_sample_weight", "sum": "sum"}.get(kind, "mean")
    model.compile(optimizer_of(kind), Squares(reduction, notes))
    return model


def train(kind: str, me: int, dies: int, step: int, folder: Path) -> None:
    """Train on all ranks, and compare the weights with those of a single process."""
    folder.mkdir(exist_ok=True)
    size = hvdtrain.size()
    model = model_of(kind, folder / f"{me}.txt")
    hvdtrain.distribute(model)
    targets = np.stack([Y, np.arange(ROWS)], axis=1).astype("float32")
    options = {"sample_weight": WEIGHTS} if kind == "weights" else {}
    callbacks = [Die(step)] if me == dies else []
    model.fit(
        X, targets, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks, **options
    )

    notes = [path.read_text().splitlines() for path in sorted(folder.glob("*.txt"))]
    assert len(notes) == size
    if kind == "accumulating" and step % 2:
        notes[_with_length(notes, step)].pop()  # its gradients waited for this step
    # A single rank computes the expected weights.
    expected = _expected(kind, size, step, notes) if hvdtrain.is_chief() else None
    expected = world.collectives().broadcast_object(expected)
    for one, other in zip(model.get_weights(), expected):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    print(f"{kind}: rank {me} is equal after {max(map(len, notes))} steps", flush=True)


def _expected(kind: str, size: int, step: int, notes: list[list[str]]) -> list[Any]:
    """Train in this process on the samples of all ranks, and return the weights."""
    targets = np.stack([Y, np.arange(ROWS)], axis=1).astype("float32")
    alone = model_of(kind, None)
    seen: list[int] = []
    for number in range(max(map(len, notes))):
        if kind == "scaled rate":
            # The step that loses a rank keeps its learning rate.
            alone.optimizer.learning_rate = 0.01 * (size if number <= step else size - 1)
        lines = [lines[number] for lines in notes if number < len(lines)]
        batch = sorted({sample for line in lines for sample in json.loads(line)})
        seen += batch
        weights = WEIGHTS[batch] if kind == "weights" else None
        alone.train_on_batch(X[batch], targets[batch], sample_weight=weights)
    assert sorted(seen) == sorted(list(range(ROWS)) * EPOCHS), "each sample once in each epoch"
    return [array.tolist() for array in alone.get_weights()]


def _with_length(notes: list[list[str]], length: int) -> int:
    """Return the index of the rank whose notes end at ``length``."""
    return next(number for number, lines in enumerate(notes) if len(lines) == length)


if __name__ == "__main__":
    hvdtrain.init()
    first_rank = hvdtrain.rank()
    for position, (kind, dies, step) in enumerate(json.loads(sys.argv[2])):
        train(kind, first_rank, dies, step, Path(sys.argv[1]) / str(position))
