"""A short training whose chief prints the weights. Run it with ``pod_training.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

import hvdtrain

STEPS = 24
BATCH = 4


def main(folder: Path) -> None:
    hvdtrain.init()
    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).normal(size=(STEPS * BATCH, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    hvdtrain.distribute(model)
    model.fit(
        rows,
        rows.sum(axis=1, keepdims=True),
        batch_size=BATCH,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=[hvdtrain.Checkpoint(folder / "checkpoint", every_steps=100)],
    )
    if hvdtrain.is_chief():
        weights = [float(x) for array in model.get_weights() for x in array.ravel()]
        print("weights", hvdtrain.size(), weights, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
