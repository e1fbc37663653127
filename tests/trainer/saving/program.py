"""A training program that prints its results for comparison.

    program.py DIRECTORY [--fault kill|stop|preempt]

With ``--fault``, one rank receives a signal after two checkpoints have been written, unless the
training was resumed.
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
from tests.checkpoint.samples import saved_steps
from tests.trainer.saving.seen import Seen

ROWS = 131
CLASSES = 3
PATIENCE_S = 1
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--fault", choices=SIGNALS)
arguments = parser.parse_args()


def loss(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class Fault(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rank = 0 if arguments.fault == "kill" else hvdtrain.size() - 1
        self.left = 8
        self.sent = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left > 0 or self.sent or hvdtrain.rank() != self.rank:
            return
        # Wait for a checkpoint in progress. The next one needs another step of this rank.
        before, deadline = len(written()), time.monotonic() + PATIENCE_S
        while len(written()) == before < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        if len(written()) >= 2:
            self.sent = True
            os.kill(os.getpid(), SIGNALS[arguments.fault])


def written() -> list[int]:
    """Return the steps of the checkpoints on the disk."""
    return saved_steps(arguments.directory)


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
model.compile(optimizer, loss=loss, metrics=[Seen(ROWS)])
hvdtrain.distribute(model)
fresh = not written()
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
