"""What it costs a training to report how far it is.

    hvdtrain run -np 2 -- python benchmarks/telemetry_cost.py
    hvdtrain run -np 2 -- python benchmarks/telemetry_cost.py --epochs 60 --batch-size 16

LeNet on random images. Every other epoch the ranks are mute: they neither read the loss, nor time
their input, nor tell the launcher anything, so that both are measured in the same minute on the
same machine. Medians of the epochs are compared; the first two, which compile, don't count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import keras

import hvdtrain
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.monitor import report

WARM_UP = 2


class Turns(keras.callbacks.Callback):
    """Lets this rank report in every other epoch, and times all of them."""

    def __init__(self) -> None:
        super().__init__()
        reporter = report._begin()
        self._told = {True: reporter.tell, False: lambda: None}
        self._heard = {True: report.is_heard, False: lambda: False}
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        reports = epoch % 2 == 0
        report._begin().tell = self._told[reports]  # type: ignore[method-assign]
        report.is_heard = self._heard[reports]
        self._began_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch >= WARM_UP:
            self.seconds[epoch % 2 == 0].append(time.perf_counter() - self._began_s)


def main() -> None:
    """Train, and print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=42, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="in an epoch; default %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank; default %(default)s")
    asked = parser.parse_args()
    hvdtrain.init()
    if not report.is_heard():
        raise SystemExit("nobody listens: start it with hvdtrain run")
    model = build_model("lenet")
    images, labels = synthetic_data(model, asked.steps * asked.batch_size * hvdtrain.size())
    hvdtrain.distribute(model)
    turns = Turns()
    model.fit(
        images,
        labels,
        batch_size=asked.batch_size,
        epochs=asked.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[turns],
    )
    if not hvdtrain.is_chief():
        return
    told, mute = (statistics.median(turns.seconds[way]) for way in (True, False))
    step_ms = {"reporting": told / asked.steps * 1e3, "mute": mute / asked.steps * 1e3}
    print(f"a step takes {step_ms['reporting']:.3f} ms, and mute {step_ms['mute']:.3f} ms")
    print(f"reporting costs {told / mute - 1:+.2%} (at most 1 %)")


if __name__ == "__main__":
    main()
