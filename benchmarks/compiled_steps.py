"""Compare compiled training steps of two ranks with plain Keras, without the communication.

    hvdtrain run -np 2 -- python benchmarks/compiled_steps.py

Each rank uses a core of its own, and trains alternately with plain Keras and with the other rank.
Reductions are subtracted from the steps of all ranks. The table shows the fastest step of the chief
as elapsed time, and as processor time, which other programs affect less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import make_parser, print_head, print_row

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.models import build_model, synthetic_data

BATCH_SIZES = {"lenet": 64, "transformer": 8, "resnet50": 4}
# Steps per call of fit. The first ones compile or wait for data.
STEPS, WARMUP_STEPS = 8, 3


class Clock(keras.callbacks.Callback):
    """Records the elapsed and the processor time of steps, without ``excluded`` functions."""

    def __init__(self) -> None:
        super().__init__()
        self._excluded = np.zeros(2)
        self.steps: list[np.ndarray] = []

    def excluded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = np.array([time.perf_counter(), time.thread_time()])
            result = function(*args, **options)
            self._excluded += np.array([time.perf_counter(), time.thread_time()]) - start
            return result

        return call

    def _now(self) -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()]) - self._excluded

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._start = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= WARMUP_STEPS:
            self.steps.append(self._now() - self._start)


def compiled(name: str) -> keras.Model:
    model = build_model(name)
    model.compile(keras.optimizers.Adam(1e-3), model.loss, metrics=["accuracy"], jit_compile=True)
    return model


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=[*BATCH_SIZES])
    parser.add_argument("--rounds", type=int, default=10, help="default: 10")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvdtrain.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[hvdtrain.local_rank() % len(cores)]})
    engine = world.collectives()
    reduce = engine.grouped_allreduce
    if hvdtrain.is_chief():
        print_head(
            *("model", "plain Keras", "two ranks", "ratio", "processor", "two ranks", "ratio")
        )
    for name in arguments.models:
        plain, together = compiled(name), hvdtrain.distribute(compiled(name))
        clocks = Clock(), Clock()
        vars(engine)["grouped_allreduce"] = clocks[1].excluded(reduce)
        size = BATCH_SIZES[name]
        x, y = synthetic_data(plain, size * STEPS * engine.size)
        for _ in range(arguments.rounds):
            for model, clock, rows in (plain, clocks[0], size * STEPS), (together, clocks[1], None):
                engine.barrier(name="benchmark")
                model.fit(x[:rows], y[:rows], batch_size=size, verbose=0, callbacks=[clock])
        alone, joint = (1000 * np.min(clock.steps, axis=0) for clock in clocks)
        if hvdtrain.is_chief():
            pairs = zip(alone, joint)
            print_row(name, *(f"{a:.1f} ms | {j:.1f} ms | {j / a:.2f}" for a, j in pairs))


if __name__ == "__main__":
    main()
