"""What the chaos test trains: slow steps, and an account of every sample.

chaos_training.py DIRECTORY EPOCHS STEP_S
"""

import json
import sys
import time
from typing import Any

import keras
import numpy as np

import hvdtrain
from tests.keras.saving.seen import Seen

ROWS = 240
BATCH_SIZE = 2

directory, epochs, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


def loss(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.mean_squared_error(y_true[:, :1], y_pred)


class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(step_s)


hvdtrain.init()
keras.utils.set_random_seed(7)
random = np.random.default_rng(1)
x = random.normal(size=(ROWS, 5)).astype("float32")
y = np.stack([x @ np.arange(5.0), np.arange(ROWS)], axis=1).astype("float32")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=[Seen(ROWS)])
hvdtrain.distribute(model)
history = model.fit(
    x,
    y,
    batch_size=BATCH_SIZE,
    epochs=epochs,
    verbose=0,
    callbacks=[Slowly(), hvdtrain.Checkpoint(directory, every_s=1.0)],
)
if hvdtrain.is_chief():
    print(
        json.dumps({name: [float(v) for v in entries] for name, entries in history.history.items()})
    )
