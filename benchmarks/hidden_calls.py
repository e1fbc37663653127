"""One rank's part of hidden_allreduce.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
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
    """Notes when steps have begun and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.begins_s: list[float] = []
        self.ends_s: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begins_s.append(time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        """How long a step took, once warm."""
        ends_s = self.ends_s[WARMUP_STEPS - 1 :]
        return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


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

    def combines() -> float:
        return combine(engine, weights, job["steps"])

    ways: dict[str, Callable[[], float]] = {
        "computes": lambda: fit(models["computes"], job, 1).step_s,
        "combines": combines,
        "together": lambda: fit(models["together"], job, engine.size).step_s,
        "buckets": lambda: fit(models["buckets"], job, engine.size).step_s,
        "bound": lambda: bound(engine, models["bound"], job, combines()),
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
        size = sum(array.nbytes for array in weights)
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


def fit(model: keras.Model, job: dict[str, Any], ranks: int) -> StepTimes:
    """Train so many steps, and some to warm up."""
    x, y = synthetic_data(model, job["batch"] * (job["steps"] + WARMUP_STEPS) * ranks)
    times = StepTimes()
    model.fit(x, y, batch_size=job["batch"], verbose=0, callbacks=[times])
    return times


def bound(engine: Any, model: keras.Model, job: dict[str, Any], combines_s: float) -> float:
    """Seconds of a step in which buckets cross as fast as all do together, each once it is there.

    Args:
        engine: Of all ranks.
        model: Its gradients are not combined here.
        job: What is trained.
        combines_s: How long all gradients take.
    """
    buckets: list[tuple[float, int]] = []

    def note(arrays: Any, *_: Any, **__: Any) -> Any:
        buckets.append((time.perf_counter(), sum(array.nbytes for array in arrays)))
        return [array.copy() for array in arrays]

    engine.grouped_allreduce = note
    try:
        times = fit(model, job, engine.size)
    finally:
        del engine.grouped_allreduce
    steps = [
        step_bound([b for b in buckets if begin_s <= b[0] <= end_s], begin_s, end_s, combines_s)
        for begin_s, end_s in zip(times.begins_s, times.ends_s)
    ]
    return median(steps[WARMUP_STEPS:])


def step_bound(
    buckets: list[tuple[float, int]], begin_s: float, end_s: float, combines_s: float
) -> float:
    """The same of one step, which began and ended then without combining.

    Args:
        buckets: When each was there, and its bytes.
        begin_s: As ``end_s``, by the clock of the buckets.
        end_s: What follows the last bucket follows it when that is combined, too.
        combines_s: How long all buckets take.
    """
    whole = sum(nbytes for _, nbytes in buckets)
    combined_s = begin_s
    for there_s, nbytes in buckets:
        combined_s = max(combined_s, there_s) + combines_s * nbytes / whole
    return combined_s - begin_s + end_s - buckets[-1][0]


def combine(engine: Any, weights: list[np.ndarray], times: int) -> float:
    """Seconds of an allreduce of all gradients."""
    begun_s = time.perf_counter()
    for _ in range(times):
        engine.grouped_allreduce(weights, "average", name="gradients")
    return (time.perf_counter() - begun_s) / times


if __name__ == "__main__":
    main()
