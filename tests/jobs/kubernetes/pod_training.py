"""A training that counts how often each sample was used: ``pod_training.py FOLDER``.

Every sample has its own weight, to which a step with the sample adds -1.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain
from tests.launch.elastic_fit import Total

ROWS = 101
BATCH = 2
EPOCHS = 2
STEP_S = 0.5


class SlowStart(keras.callbacks.Callback):
    """Leaves time to delete a pod in the first attempt."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if os.environ["HVDTRAIN_ATTEMPT"] == "1":
            time.sleep(STEP_S)


def main(folder: Path) -> None:
    hvdtrain.init()
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((ROWS,)), dense])
    model.compile(keras.optimizers.SGD(1.0), Total())
    hvdtrain.distribute(model)
    model.fit(
        np.eye(ROWS, dtype="float32"),
        np.zeros((ROWS, 1), "float32"),
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[SlowStart(), hvdtrain.Checkpoint(folder / "checkpoint", every_steps=1000)],
    )
    if hvdtrain.is_chief():
        print("visits", np.unique(-model.get_weights()[0]).tolist(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
