"""A training whose steps take a set time; ``slow_worker.py`` and ``overlap.py`` run it.

Sleeping stands for computing, so that a worker has a speed of its own also where ranks share cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import keras

import hvdtrain
from hvdtrain.bench.models import build_model, synthetic_data

BATCH_SIZE = 8
# Compiling the step is no part of it.
WARMUP_STEPS = 5


class Pace(keras.callbacks.Callback):
    """Lets each step begin so many seconds later, and notes when steps have ended."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self.ends_s: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._step_s)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends_s.append(time.perf_counter())


def main() -> None:
    """Train, and write this rank's steps a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where ranks write what they found")
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lenet", action="store_true", help="1.7 million parameters, not 10,000")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--times", type=float, default=1.0, help="how much slower that rank is")
    asked = parser.parse_args()

    hvdtrain.init()
    rank = hvdtrain.rank()
    pace = Pace(asked.step_ms / 1000 * (asked.times if rank == asked.slow_rank else 1.0))
    model = build_model("lenet") if asked.lenet else _build_small()
    hvdtrain.distribute(model)
    x, y = synthetic_data(model, BATCH_SIZE * asked.steps * hvdtrain.size())
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[pace])
    if len(pace.ends_s) > WARMUP_STEPS:  # a worker, and no server
        seconds = pace.ends_s[-1] - pace.ends_s[WARMUP_STEPS - 1]
        found = {"rank": rank, "steps_per_s": (len(pace.ends_s) - WARMUP_STEPS) / seconds}
        Path(asked.folder, f"{rank}.json").write_text(json.dumps(found))


def _build_small() -> keras.Model:
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")
    return model


if __name__ == "__main__":
    main()
