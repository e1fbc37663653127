"""A program for elastic jobs with several trainings, in each of which a rank dies.

    elastic_fit.py SCENARIOS    (JSON: a list of dictionaries with the fields of Scenario)

Every sample has its own weight, to which a step with the sample adds -1. These weights therefore
count how often each sample was used. The remaining ranks print one line of JSON with the results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain

ROWS = 101
BATCH = 4
# The validation's targets differ between samples, so that a missing sample is detected.
TARGETS = np.arange(ROWS, dtype="float32")[:, np.newaxis]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training."""

    dies: int  # initial rank of the process that dies
    moment: str = "step"  # or another hook, such as "test step" or "epoch end", or "seconds"
    turn: float = 3  # in which call of the hook, from 0, or after how many seconds
    delay_s: float = 0.0  # after that moment
    by: int = signal.SIGKILL
    data: str = "arrays"  # or "pipeline", "batches" (PyDataset), "filtered" (unknown length)
    layer: str = "dense"  # or "embedding", for sparse gradients
    accumulate: int | None = None  # steps whose gradients are applied together
    epochs: int = 2
    fit: dict[str, Any] | None = None  # more arguments of ``fit``
    compile: dict[str, Any] | None = None  # more arguments of ``compile``
    validate: bool = False
    checkpoint: str | None = None  # a folder
    files: str | None = None  # a folder for files of the chief's callbacks

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)


class Total(keras.losses.Loss):
    """The sum of the outputs, which are weights of samples, and of the targets, 0 in training."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return seen(y_true, y_pred)


def seen(y_true: Any, y_pred: Any) -> Any:
    """Return a metric whose mean does not depend on the number of ranks."""
    return y_pred[:, 0] + y_true[:, 0]


class Batches(keras.utils.PyDataset):
    """The samples as batches."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self._x[part], self._y[part]


class Watch(keras.callbacks.Callback):
    """Kills its own process at the scenario's moment, and records what other ranks see."""

    def __init__(self, scenario: Scenario, rank: int) -> None:
        super().__init__()
        self._scenario = scenario
        self._mortal = rank == scenario.dies
        self._turns = 0
        self.steps = 0
        # For each epoch, whether the validation saw each sample once.
        self.exact: list[bool] = []

    def _moment(self, name: str) -> None:
        if self._mortal and name == self._scenario.moment:
            if self._turns == self._scenario.turn:
                self._die_after(self._scenario.delay_s)
            self._turns += 1

    def _die_after(self, delay_s: float) -> None:
        if not delay_s:
            os.kill(os.getpid(), self._scenario.by)
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), self._scenario.by))
        timer.daemon = True
        timer.start()

    def on_train_begin(self, logs: Any = None) -> None:
        if self._mortal and self._scenario.moment == "seconds":
            self._die_after(self._scenario.turn)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._moment("epoch begin")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._moment("step")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self._moment("step end")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._moment("test step")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._moment("epoch end")
        visits = -np.asarray(self.model.get_weights()[0]).reshape(-1)
        if logs and "val_loss" in logs:
            expected = float(np.mean(TARGETS)) - float(np.mean(visits))
            self.exact.append(abs(logs["val_seen"] - expected) < 1e-3)


def model_of(scenario: Scenario) -> keras.Model:
    """Return a model with a weight per sample, and a learning rate that counts visits."""
    if scenario.layer == "embedding":
        layers = [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros"),
            keras.layers.Flatten(),
        ]
    else:
        layers = [
            keras.Input((ROWS,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    model = keras.Sequential(layers)
    rate = float(scenario.accumulate or 1)
    optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=scenario.accumulate)
    model.compile(optimizer, Total(), **{"metrics": [seen], **(scenario.compile or {})})
    return model


def data_of(scenario: Scenario) -> dict[str, Any]:
    """Return the data for ``fit``."""
    x = np.eye(ROWS, dtype="float32")
    if scenario.layer == "embedding":
        x = np.arange(ROWS, dtype="int32")[:, np.newaxis]
    y = np.zeros((ROWS, 1), "float32")
    if scenario.data == "batches":
        return {"x": Batches(x, y)}
    if scenario.data in ("pipeline", "filtered"):
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5).batch(BATCH)
        if scenario.data == "filtered":
            dataset = dataset.filter(lambda x, y: tf.shape(x)[0] > 0)
        return {"x": dataset}
    return {"x": x, "y": y, "batch_size": BATCH}


def train(scenario: Scenario, rank: int) -> dict[str, Any]:
    """Train, and return the results of this rank."""
    keras.utils.set_random_seed(3)
    model = model_of(scenario)
    hvdtrain.distribute(model)
    watch = Watch(scenario, rank)
    callbacks: list[Any] = [watch]
    if scenario.checkpoint:
        callbacks.append(hvdtrain.Checkpoint(scenario.checkpoint, every_steps=2))
    if scenario.files:
        folder = Path(scenario.files)
        callbacks.append(keras.callbacks.CSVLogger(folder / "log.csv"))
        best = keras.callbacks.ModelCheckpoint(
            folder / "best-{epoch}.keras", monitor="loss", mode="max", save_best_only=True
        )
        callbacks.append(best)
    validation = None
    if scenario.validate:
        validation = data_of(Scenario(dies=-1, layer=scenario.layer))
        validation = (validation["x"], TARGETS)
    history = model.fit(
        **data_of(scenario),
        epochs=scenario.epochs,
        verbose=0,
        callbacks=callbacks,
        validation_data=validation,
        validation_batch_size=1,
        **(scenario.fit or {}),
    )
    weights = np.asarray(model.get_weights()[0]).reshape(-1)
    return {
        "visits": sorted(set((-weights).tolist())),
        "missing": int(np.sum(-weights < scenario.epochs)),
        "size": hvdtrain.size(),
        "steps": watch.steps,
        "exact": watch.exact,
        "loss": history.history["loss"],
    }


def main(scenarios: list[Scenario]) -> None:
    hvdtrain.init()
    rank = hvdtrain.rank()
    results = [train(scenario, rank) for scenario in scenarios]
    print(json.dumps({"first_rank": rank, "results": results}), flush=True)


if __name__ == "__main__":
    main([Scenario(**entry) for entry in json.loads(sys.argv[1])])
