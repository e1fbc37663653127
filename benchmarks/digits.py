"""Learns handwritten digits with the network of examples/mnist.py; ``convergence.py`` runs it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from mnist import build_model
from mnist_data import load_digits

import hvdtrain
from hvdtrain import world
from hvdtrain.collectives.interface import Collectives


class Course(keras.callbacks.Callback):
    """Notes seconds and validation loss after each epoch; on the chief."""

    def __init__(self) -> None:
        super().__init__()
        self._start_s = 0.0
        self.points: list[tuple[float, float]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self._start_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs and "val_loss" in logs:
            self.points.append((time.perf_counter() - self._start_s, float(logs["val_loss"])))


def count_bytes(collectives: Collectives) -> Callable[[], int]:
    """Count from now on; returns what tells how many bytes this rank has given to be reduced."""
    given: list[int] = []
    plain = collectives.grouped_allreduce

    def grouped_allreduce(arrays: Any, *args: Any, **options: Any) -> list[np.ndarray]:
        given.extend(array.nbytes for array in arrays)
        return plain(arrays, *args, **options)

    vars(collectives)["grouped_allreduce"] = grouped_allreduce
    return lambda: sum(given)


def main() -> None:
    """Train; the chief writes the course and the accuracy on the test digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the chief writes what it found")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    asked = parser.parse_args()

    hvdtrain.init()
    keras.utils.set_random_seed(1)
    digits = load_digits()
    model = build_model()
    rate = hvdtrain.scale_learning_rate(asked.learning_rate)
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    hvdtrain.distribute(model)
    test = digits.test_images[..., None], digits.test_labels
    course, reduced = Course(), count_bytes(world.collectives())
    model.fit(
        digits.train_images[..., None],
        digits.train_labels,
        batch_size=asked.batch_size,
        epochs=asked.epochs,
        validation_data=test,
        verbose=0,
        callbacks=[course],
    )
    results = model.evaluate(*test, verbose=0, return_dict=True)
    if hvdtrain.is_chief():
        found = {"points": course.points, "accuracy": results["accuracy"], "bytes": reduced()}
        Path(asked.folder, "chief.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
