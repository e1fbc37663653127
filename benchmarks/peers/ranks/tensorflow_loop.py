"""Training with a loop over a ``tf.function``, as in Horovod's guides, or in one process."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.bench.models import build_model, synthetic_data
from peers.ranks.clocks import StepClock, figures_of

__all__ = ["measure"]


def measure(job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure samples per second of the loop and memory, after a warm-up."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(job.get("inter_op_threads", 1))
    hvd: Any = None
    rank, size = 0, 1
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    if job["library"] == "horovod":
        hvd = importlib.import_module("horovod.tensorflow")
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        versions["horovod"] = importlib.metadata.version("horovod")
    clock = StepClock(rank, job)
    results: dict[str, Any] = {"versions": versions, "ranks": size}
    for name, (batch, steps) in job["models"].items():
        training = _Training(name, hvd)
        whole = synthetic_data(training.model, batch * steps * size)
        x, y = (array[rank::size] for array in whole)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).prefetch(1)
        training.run(data.take(job["warmup_steps"]), clock)
        start_s = time.perf_counter()
        training.run(data)
        results |= figures_of(name, batch * steps * size, time.perf_counter() - start_s)
    return {**results, **clock.figures()} if rank == 0 else None


class _Training:
    """A model and its training step.

    Args:
        name: Name of the model.
        hvd: ``horovod.tensorflow``, or None in one process.
    """

    def __init__(self, name: str, hvd: Any) -> None:
        self.model = build_model(name)
        self._hvd = hvd
        self._optimizer = keras.optimizers.SGD(0.001)
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._step = tf.function(self._compute)

    def run(self, data: tf.data.Dataset, clock: StepClock | None = None) -> None:
        """Train on batches, count them in ``clock``, and broadcast the initial weights."""
        for number, (x, y) in enumerate(data):
            loss = self._step(x, y)
            if clock is not None:
                loss.numpy()
                clock.step_ended()
                if number == 0 and self._hvd is not None:
                    self._hvd.broadcast_variables(self.model.variables, root_rank=0)
        loss.numpy()

    def _compute(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
        if self._hvd is not None:
            tape = self._hvd.DistributedGradientTape(tape)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self._optimizer.apply_gradients(zip(gradients, variables))
        return loss
