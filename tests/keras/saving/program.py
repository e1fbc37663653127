"""A training program, as a user would write it; what it printed is compared between runs.

    program.py DIRECTORY [--fault kill|stop|preempt]

After some steps one rank gets a signal, once two checkpoints are on disk; but not if the training
began with a checkpoint.
"""

import argparse
import hashlib
import os
import signal
import time
from typing import Any

import keras
import numpy as np

import hvdtrain
from hvdtrain.checkpoint import Store

ROWS = 131
CLASSES = 3
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--fault", choices=SIGNALS)
arguments = parser.parse_args()


class Seen(keras.metrics.Metric):
    """How often each sample of the epoch was computed with: the least and the most."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(ROWS,), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(ids, ROWS), axis=0))

    def result(self) -> dict[str, Any]:
        return {"least": keras.ops.min(self.counts), "most": keras.ops.max(self.counts)}


def loss(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class Fault(keras.callbacks.Callback):
    """Sends the signal."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0 if arguments.fault == "kill" else hvdtrain.size() - 1
        self.left = 8

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and hvdtrain.rank() == self.rank:
            deadline = time.monotonic() + 60
            while len(Store(arguments.directory).steps()) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), SIGNALS[arguments.fault])


hvdtrain.init()
keras.utils.set_random_seed(7)
rng = np.random.default_rng(1)
x = rng.normal(size=(ROWS, 5)).astype("float32")
y = np.stack([rng.integers(0, CLASSES, ROWS), np.arange(ROWS)], axis=1)
model = keras.Sequential(
    [
        keras.Input((5,)),
        keras.layers.Dense(8, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(CLASSES),
    ]
)
optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
model.compile(optimizer, loss=loss, metrics=[Seen()])
hvdtrain.distribute(model)
fresh = not Store(arguments.directory).steps()
callbacks: list[Any] = [Fault()] if arguments.fault and fresh else []
callbacks.append(hvdtrain.Checkpoint(arguments.directory, every_steps=1))
history = model.fit(
    x,
    y,
    batch_size=4,
    epochs=3,
    verbose=0,
    callbacks=callbacks,
)
if hvdtrain.is_chief():
    digest = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        digest.update(np.asarray(variable.numpy()).tobytes())
    print("weights", digest.hexdigest())
    for name, values in sorted(history.history.items()):
        print(name, [float(value) for value in values])
