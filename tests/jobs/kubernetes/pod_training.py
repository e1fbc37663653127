"""A training that takes as long as it is told to, with a checkpoint now and then.

    pod_training.py FOLDER STEPS SECONDS EVERY

``STEPS`` steps of ``SECONDS`` each; a checkpoint in ``FOLDER/checkpoint`` after each ``EVERY``
steps. The chief prints the weights at the end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvdtrain

BATCH = 4


class Slow(keras.callbacks.Callback):
    """Makes steps take their time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self._seconds)


def main(folder: Path, steps: int, seconds: float, every: int) -> None:
    hvdtrain.init()
    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).normal(size=(steps * BATCH, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    hvdtrain.distribute(model)
    checkpoint = hvdtrain.Checkpoint(folder / "checkpoint", every_steps=every)
    # As many steps as asked for on one rank; more ranks have fewer.
    model.fit(
        rows,
        rows.sum(axis=1, keepdims=True),
        batch_size=BATCH,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=[checkpoint, Slow(seconds)],
    )
    if hvdtrain.is_chief():
        weights = [float(x) for array in model.get_weights() for x in array.ravel()]
        print("weights", hvdtrain.size(), weights, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
