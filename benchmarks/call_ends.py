"""How soon fit, evaluate and predict return after their last callback.

    hvdtrain run -np 2 -- python benchmarks/call_ends.py
    hvdtrain run -np 2 -- python benchmarks/call_ends.py --seconds 120

Each is called on arrays, a tf.data pipeline and a PyDataset. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain import world

BATCH_SIZE = 16
FEATURES = 8
STEPS = 5


class Stopped(Exception):
    """Ends a training from within."""


class Ends(keras.callbacks.Callback):
    """Notes when the last callback of a call was called; paces its steps.

    Args:
        step_s: How long to wait after each step.
        raise_after: Raise in place of ending after so many steps.
    """

    def __init__(self, step_s: float = 0.0, raise_after: int = 0) -> None:
        super().__init__()
        self._step_s, self._raise_after = step_s, raise_after
        self._steps = 0
        self.at_s = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._step_s)
        self._steps += 1
        if self._steps == self._raise_after:
            self.at_s = time.perf_counter()
            raise Stopped

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._step_s)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._step_s)

    def on_train_end(self, logs: Any = None) -> None:
        self.at_s = time.perf_counter()

    def on_test_end(self, logs: Any = None) -> None:
        self.at_s = time.perf_counter()

    def on_predict_end(self, logs: Any = None) -> None:
        self.at_s = time.perf_counter()


class Rows(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x) // BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return self._x[rows], self._y[rows]


def main() -> None:
    """Measure all, and print a table on the chief."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each call takes")
    asked = parser.parse_args()

    hvdtrain.init()
    model = build()
    hvdtrain.distribute(model)
    inputs = make_inputs(STEPS * hvdtrain.size())
    say(f"{hvdtrain.size()} ranks; calls of {asked.seconds:g} s in {STEPS} steps")
    say("after the last callback, ms   arrays  tf.data  PyDataset")
    step_s = asked.seconds / STEPS
    for name, call in calls(model).items():
        for given in inputs.values():
            measure_end(call, given, name, step_s=0.0)  # traces
        ends = [measure_end(call, given, name, step_s) * 1e3 for given in inputs.values()]
        say(f"{name:28}" + "".join(f"{end:9.1f}" for end in ends))


def build() -> keras.Model:
    """A small model."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def make_inputs(batches: int) -> dict[str, Any]:
    """So many batches, of each kind."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batches * BATCH_SIZE, FEATURES)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    return {"arrays": (x, y), "tf.data": data, "PyDataset": Rows(x, y)}


def calls(model: keras.Model) -> dict[str, Callable[[Any, Ends], Any]]:
    """What is called, with an input and a callback."""

    def fit(given: Any, ends: Ends) -> None:
        model.fit(*arguments(given), verbose=0, callbacks=[ends], **options(given))

    def stop_early(given: Any, ends: Ends) -> None:
        early = keras.callbacks.EarlyStopping("mae", patience=0, min_delta=1e9)
        several = {"epochs": 5, **options(given)}
        model.fit(*arguments(given), verbose=0, callbacks=[early, ends], **several)

    def evaluate(given: Any, ends: Ends) -> None:
        model.evaluate(*arguments(given), verbose=0, callbacks=[ends], **options(given))

    def predict(given: Any, ends: Ends) -> None:
        x = given[0] if isinstance(given, tuple) else given
        model.predict(x, verbose=0, callbacks=[ends], **options(given))

    return {
        "fit": fit,
        "EarlyStopping": stop_early,
        "an exception": fit,
        "evaluate": evaluate,
        "predict": predict,
    }


def arguments(given: Any) -> tuple[Any, ...]:
    """An input as positional arguments of Keras' methods."""
    return given if isinstance(given, tuple) else (given,)


def options(given: Any) -> dict[str, Any]:
    """What else an input needs."""
    return {"batch_size": BATCH_SIZE} if isinstance(given, tuple) else {}


def measure_end(call: Callable[[Any, Ends], Any], given: Any, name: str, step_s: float) -> float:
    """Seconds from the last callback to the return of a call, on the slowest rank."""
    ends = Ends(step_s, STEPS if name == "an exception" else 0)
    with contextlib.suppress(Stopped):
        call(given, ends)
    return slowest(time.perf_counter() - ends.at_s)


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    return float(world.collectives().allreduce(np.array(seconds), "max", name="slowest"))


def say(line: str) -> None:
    """Print on the chief."""
    if hvdtrain.is_chief():
        print(line, flush=True)


if __name__ == "__main__":
    main()
