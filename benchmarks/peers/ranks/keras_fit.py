"""Training with Keras' ``fit``: in one process, with hvdtrain, or with TensorFlow's ring."""

from __future__ import annotations

import os
import time
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.bench.models import build_model, synthetic_data
from peers.ranks.clocks import StepClock, figures_of

__all__ = ["measure"]


class _Steps(keras.callbacks.Callback):
    """A callback that counts steps in a clock."""

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._clock.step_ended()


def measure(job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure samples per second of ``fit`` and memory, after a warm-up."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(job.get("inter_op_threads", 1))
    rank, size = 0, 1
    distributed = job["library"] != "keras"
    if distributed:
        if job["library"] == "ring":
            os.environ["HVDTRAIN_BACKEND"] = "nccl"
        import hvdtrain

        hvdtrain.init()
        rank, size = hvdtrain.rank(), hvdtrain.size()
    clock = StepClock(rank, job)
    versions = {"tensorflow": tf.__version__, "keras": keras.version()}
    results: dict[str, Any] = {"versions": versions, "ranks": size}
    for name, (batch, steps) in job["models"].items():
        model = build_model(name)
        if distributed:
            hvdtrain.distribute(model)
        x, y = synthetic_data(model, batch * steps * size)
        warm_up = batch * job["warmup_steps"] * size
        arguments = {"batch_size": batch, "verbose": 0}
        model.fit(x[:warm_up], y[:warm_up], callbacks=[_Steps(clock)], **arguments)
        start_s = time.perf_counter()
        model.fit(x, y, **arguments)
        results |= figures_of(name, len(x), time.perf_counter() - start_s)
    return {**results, **clock.figures()} if rank == 0 else None
