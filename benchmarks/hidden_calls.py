"""One rank's part of hidden_allreduce.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain import world
from hvdtrain.cluster.topology import read_topology

WARMUP_STEPS = 3


class StepTimes(keras.callbacks.Callback):
    """Notes when steps have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends_s.append(time.perf_counter())


def main() -> None:
    """Measure in turn; the chief prints seconds of a step by way."""
    job = json.loads(sys.argv[1])
    if job["inter_op_threads"]:
        tf.config.threading.set_inter_op_parallelism_threads(job["inter_op_threads"])
    if job["one_core"]:
        cores = sorted(os.sched_getaffinity(0))
        # All hosts are this machine.
        rank = read_topology(os.environ).rank
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    hvdtrain.init()
    engine: Any = world.collectives()
    bucket_bytes = job["bucket_bytes"] or engine.bucket_bytes
    models = {
        name: build(job["width"], job["layers"]) for name in ("computes", "together", "buckets")
    }
    for name in ("together", "buckets"):
        hvdtrain.distribute(models[name])
    weights = [np.asarray(v) for v in models["computes"].trainable_variables]
    found: dict[str, list[float]] = {}
    ways: dict[str, Callable[[], float]] = {
        "computes": lambda: fit(models["computes"], job, 1),
        "combines": lambda: combine(engine, weights, job["steps"]),
        "together": lambda: fit(models["together"], job, engine.size),
        "buckets": lambda: fit(models["buckets"], job, engine.size),
    }
    for run in range(job["runs"] + 1):
        for name, way in ways.items():
            engine.bucket_bytes = 0 if name == "together" else bucket_bytes
            engine.barrier()
            step_s = way()
            if run:  # the first traces
                found.setdefault(name, []).append(step_s)
    if hvdtrain.is_chief():
        size = sum(array.nbytes for array in weights)
        print(json.dumps({"bytes": size, "bucket_bytes": bucket_bytes, "step_s": found}))


def build(width: int, layers: int) -> keras.Model:
    """A multilayer perceptron for digits."""
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def fit(model: keras.Model, job: dict[str, int], ranks: int) -> float:
    """Seconds of a step."""
    steps = job["steps"] + WARMUP_STEPS
    chance = np.random.default_rng(1)
    x = chance.random((job["batch"] * steps * ranks, 784), np.float32)
    y = chance.integers(0, 10, len(x))
    times = StepTimes()
    model.fit(x, y, batch_size=job["batch"], verbose=0, callbacks=[times])
    return (times.ends_s[-1] - times.ends_s[WARMUP_STEPS - 1]) / job["steps"]


def combine(engine: Any, weights: list[np.ndarray], times: int) -> float:
    """Seconds of an allreduce of all gradients."""
    begun_s = time.perf_counter()
    for _ in range(times):
        engine.grouped_allreduce(weights, "average", name="gradients")
    return (time.perf_counter() - begun_s) / times


if __name__ == "__main__":
    main()
