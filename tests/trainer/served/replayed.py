"""Trains a small model with parameter servers. test_replay.py repeats the training in one process.

Run it with ``python replayed.py FOLDER``. The chief writes ``before.npz`` and ``after.npz``, which
contain the weights, followed by the optimizer's momentums.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvdtrain

WORKERS = 3
BATCH = 4
STEPS = 10
EPOCHS = 2


def make_model() -> keras.Model:
    """Return a model in float64 whose variables always have the same names."""
    keras.utils.set_random_seed(7)
    layers = [
        keras.Input((6,), dtype="float64"),
        keras.layers.Dense(7, "tanh", dtype="float64", name="first"),
        keras.layers.Dense(3, dtype="float64", name="second"),
    ]
    model = keras.Sequential(layers, name="model")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    model.compile(keras.optimizers.SGD(0.2, momentum=0.8), loss)
    return model


def make_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    # Keras rounds inputs to float32.
    x = rng.normal(size=(WORKERS * STEPS * BATCH, 6)).astype("float32")
    return x, np.abs(x).argmax(1) % 3


def batch_of(worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a worker's batch. The batches of all workers in a step are next to each other."""
    start = (step % STEPS * WORKERS + worker) * BATCH
    x, y = make_data()
    return x[start : start + BATCH], y[start : start + BATCH]


class Together(keras.callbacks.Callback):
    """Lets all workers start with the same weights, so that some gradients are stale."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_train_begin(self, logs: object = None) -> None:
        self._begun = False

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if not self._begun:
            (self._folder / f"worker-{hvdtrain.rank()}").touch()
            # The harness has a time-out.
            while len(list(self._folder.glob("worker-*"))) < WORKERS:
                time.sleep(0.02)
            self._begun = True


def main(folder: Path) -> None:
    hvdtrain.init()
    x, y = make_data()
    model = hvdtrain.distribute(make_model())
    if hvdtrain.is_chief():
        np.savez(folder / "before.npz", *model.get_weights())
    model.fit(
        *(x, y),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[Together(folder)],
    )
    if hvdtrain.is_chief():
        momentums = [variable.numpy() for variable in model.optimizer.momentums]
        np.savez(folder / "after.npz", *model.get_weights(), *momentums)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
