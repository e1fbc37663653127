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
from hvdtrain.bench.models import build_model, synthetic_data
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
    models = {name: build(job) for name in ("computes", "together", "buckets", "bound")}
    for name in ("together", "buckets", "bound"):
        hvdtrain.distribute(models[name])
    weights = [np.asarray(v) for v in models["computes"].trainable_variables]
    size = sum(array.nbytes for array in weights)

    def combines() -> float:
        return combine(engine, weights, job["steps"])

    ways: dict[str, Callable[[], float]] = {
        "computes": lambda: fit(models["computes"], job, 1),
        "combines": combines,
        "together": lambda: fit(models["together"], job, engine.size),
        "buckets": lambda: fit(models["buckets"], job, engine.size),
        "bound": lambda: bound(engine, models["bound"], job, combines() / size),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(job["runs"] + 1):
        for name, way in ways.items():
            engine.bucket_bytes = 0 if name == "together" else bucket_bytes
            engine.barrier()
            step_s = way()
            if run:  # the first traces
                found[name].append(step_s)
    if hvdtrain.is_chief():
        print(json.dumps({"bytes": size, "bucket_bytes": bucket_bytes, "step_s": found}))


def build(job: dict[str, Any]) -> keras.Model:
    """LeNet, or a multilayer perceptron for digits."""
    if job["model"] == "lenet":
        return build_model("lenet")
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(job["width"], activation="relu") for _ in range(job["layers"])]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def fit(model: keras.Model, job: dict[str, Any], ranks: int) -> float:
    """Seconds of a step."""
    steps = job["steps"] + WARMUP_STEPS
    x, y = synthetic_data(model, job["batch"] * steps * ranks)
    times = StepTimes()
    model.fit(x, y, batch_size=job["batch"], verbose=0, callbacks=[times])
    return (times.ends_s[-1] - times.ends_s[WARMUP_STEPS - 1]) / job["steps"]


def bound(engine: Any, model: keras.Model, job: dict[str, Any], s_per_byte: float) -> float:
    """Seconds of a step where combining takes its time on the links, and nothing of a core.

    Args:
        engine: Of all ranks.
        model: Its gradients are not combined here.
        job: What is trained.
        s_per_byte: How long a byte of gradients takes.
    """

    def wait(arrays: Any, *_: Any, **__: Any) -> Any:
        engine.barrier()
        time.sleep(s_per_byte * sum(array.nbytes for array in arrays))
        return [array.copy() for array in arrays]

    engine.grouped_allreduce = wait
    try:
        return fit(model, job, engine.size)
    finally:
        del engine.grouped_allreduce


def combine(engine: Any, weights: list[np.ndarray], times: int) -> float:
    """Seconds of an allreduce of all gradients."""
    begun_s = time.perf_counter()
    for _ in range(times):
        engine.grouped_allreduce(weights, "average", name="gradients")
    return (time.perf_counter() - begun_s) / times


if __name__ == "__main__":
    main()
