"""Trainings of a rank of ``against_peers.py`` in one process or many."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7
CLASSES = 10

StepEnded = Callable[[], None] | None
# Trains for a number of steps.
Trainer = Callable[[int, StepEnded], None]


class StepClock:
    """A recorder of the first step, which can also kill a rank.

    Args:
        rank: This rank.
        job: Parameters of the job. ``die`` selects a rank to kill and the step. The file ``killed``
            passes the times of the first step and the kill to restarted processes.
    """

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self._killed = Path(job["killed"])
        self._restarted = self._killed.exists()
        die = job.get("die", {"rank": None, "after_step": 0})
        self._last_step = die["after_step"] if die["rank"] == rank and not self._restarted else 0
        self._steps = 0
        self._first_s = 0.0

    def step_ended(self) -> None:
        """Count a step; call it after each step."""
        self._steps += 1
        if self._steps == 1:
            self._first_s = time.monotonic()
        if self._steps == self._last_step:
            self._killed.write_text(f"{self._first_s} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def figures(self) -> dict[str, float]:
        """Return the time of the job's first step, and the delay of the next one after a kill."""
        if self._restarted:
            first_s, killed_s = map(float, self._killed.read_text().split())
            return {"first_step_at_s": first_s, "kill_to_next_step_s": self._first_s - killed_s}
        return {"first_step_at_s": self._first_s}


def measure_training(
    job: dict[str, Any], join: Callable[[dict[str, Any]], tuple[int, int, Any]]
) -> tuple[int, dict[str, Any]]:
    """Return the rank, and samples per second and peak memory of each model after a warm-up."""
    from hvdtrain.bench.machine import peak_resident_bytes

    library = job["library"]
    if "torch" in library:
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        make_trainer, modules = torch_trainer, ["torch"]
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(job.get("inter_op_threads", 1))
        make_trainer, modules = fit_trainer, ["tensorflow", "keras"]
        if library in ("horovod", "tensorflow"):
            make_trainer = loop_trainer
        if library == "horovod":
            modules.append("horovod")
    versions = {name: importlib.import_module(name).__version__ for name in modules}
    rank, size, hvd = join(job)
    clock = StepClock(rank, job)
    results: dict[str, Any] = {"versions": versions, "ranks": size}
    for name, (batch, steps) in job["models"].items():
        train = make_trainer(name, batch, steps, rank, size, hvd)
        train(job["warmup_steps"], clock.step_ended)
        start_s = time.perf_counter()
        train(steps, None)
        speed = batch * steps * size / (time.perf_counter() - start_s)
        # The peak includes previous models.
        results |= {f"{name} samples_per_s": speed, f"{name} peak_bytes": peak_resident_bytes()}
    return rank, {**results, **clock.figures()}


def fit_trainer(name: str, batch: int, steps: int, rank: int, size: int, hvd: Any) -> Trainer:
    """Return training with Keras' ``fit``: in one process, with hvdtrain, or with its ring."""
    import keras

    from hvdtrain.bench.models import build_model, synthetic_data

    model = build_model(name)
    if hvd is not None:
        hvd.distribute(model)
    x, y = synthetic_data(model, batch * steps * size)

    def train(count: int, step_ended: StepEnded) -> None:
        callbacks = []
        if step_ended:
            callbacks.append(
                keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: step_ended())
            )
        rows = batch * count * size
        model.fit(x[:rows], y[:rows], batch_size=batch, verbose=0, callbacks=callbacks)

    return train


def loop_trainer(name: str, batch: int, steps: int, rank: int, size: int, hvd: Any) -> Trainer:
    """Return a loop over a ``tf.function``, as in Horovod's guides, or in one process."""
    import keras
    import tensorflow as tf

    from hvdtrain.bench.models import build_model, synthetic_data

    model = build_model(name)
    optimizer = keras.optimizers.SGD(0.001)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = (array[rank::size] for array in synthetic_data(model, batch * steps * size))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).prefetch(1)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        if hvd is not None:
            tape = hvd.DistributedGradientTape(tape)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def train(count: int, step_ended: StepEnded) -> None:
        for number, rows in enumerate(data.take(count)):
            loss = step(*rows)
            if step_ended:
                loss.numpy()
                step_ended()
                if number == 0 and hvd is not None:
                    hvd.broadcast_variables(model.variables, root_rank=0)
        loss.numpy()

    return train


def torch_trainer(name: str, batch: int, steps: int, rank: int, size: int, hvd: Any) -> Trainer:
    """Return a PyTorch loop: one process, DistributedDataParallel with Gloo, or hvdtrain."""
    import torch
    from torch import distributed, nn

    torch.manual_seed(SEED)
    model, shape = torch_model(name)
    if distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    generator = np.random.default_rng(SEED)
    x = torch.from_numpy(generator.random((batch * steps, *shape), np.float32))
    y = torch.from_numpy(generator.integers(0, CLASSES, len(x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    if hvd is not None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss_of = nn.CrossEntropyLoss()

    def train(count: int, step_ended: StepEnded) -> None:
        for step in range(count):
            rows = slice(step * batch, (step + 1) * batch)
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if step_ended:
                step_ended()

    return train


def torch_model(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a small model of hvdtrain.bench.models, and the shape of a sample."""
    from torch import nn

    if name == "small":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES)), (32,)
    if name == "mlp":
        wide = nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()
        return nn.Sequential(*wide, nn.Linear(4096, CLASSES)), (784,)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    ), (1, 28, 28)
