"""The training of the chaos test, which counts every sample and every step.

chaos_training.py FOLDER ROWS EPOCHS BATCH_SIZE STEP_S

The checkpoints are in FOLDER/disk/runs. FOLDER/steps has a line for each step, with its time and
number. While FOLDER/slow exists, steps take STEP_S longer.

The model also has a weight for each sample, to which a step with the sample adds the learning rate.
These weights therefore count how often each sample was used, even by ranks that were lost.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain
from tests.launch.elastic_fit import Total

folder, step_s = Path(sys.argv[1]), float(sys.argv[5])
rows, epochs, batch_size = map(int, sys.argv[2:5])
# A power of two, so that the sum is exact.
RATE = 2.0**-6


class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvdtrain.is_chief():
            with (folder / "steps").open("a") as file:
                file.write(f"{time.time():.2f} {int(self.model.optimizer.iterations)}\n")
        if (folder / "slow").exists():
            time.sleep(step_s)


hvdtrain.init()
keras.utils.set_random_seed(7)
random = np.random.default_rng(1)
features = random.normal(size=(rows, 5)).astype("float32")
x = {"features": features, "sample": np.eye(rows, dtype="float32")}
y = {
    "line": features @ np.arange(5.0, dtype="float32")[:, np.newaxis],
    "visits": np.zeros((rows, 1)),
}

inputs = {"features": keras.Input((5,)), "sample": keras.Input((rows,))}
line = keras.layers.Dense(1, name="line")(inputs["features"])
counter = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="visits")
model = keras.Model(inputs, {"line": line, "visits": counter(inputs["sample"])})
losses = {"line": keras.losses.MeanSquaredError(reduction="sum"), "visits": Total()}
model.compile(keras.optimizers.SGD(RATE), losses)
hvdtrain.distribute(model)
history = model.fit(
    x,
    y,
    batch_size=batch_size,
    epochs=epochs,
    verbose=0,
    callbacks=[Slowly(), hvdtrain.Checkpoint(folder / "disk/runs", every_s=1.0)],
)
if hvdtrain.is_chief():
    visits = -counter.get_weights()[0] / RATE
    loss = [float(value) for value in history.history["line_loss"]]
    print(json.dumps({"visits": [float(visits.min()), float(visits.max())], "loss": loss}))
