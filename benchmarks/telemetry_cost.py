"""Measure the cost of progress reports.

    hvdtrain run -np 2 -- python benchmarks/telemetry_cost.py
    hvdtrain run -np 2 -- python benchmarks/telemetry_cost.py --epochs 60 --batch-size 16

Trains LeNet on random images. In every other epoch, ranks don't read the loss, don't time their
input and don't report, so that both cases are measured at the same time. The medians of the epochs
are compared, without the first two, which compile.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras
from common import make_parser

import hvdtrain
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.monitor import report

WARM_UP = 2


class AlternatingReports(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        reporter = report._update()
        self._told = {True: reporter.send, False: lambda: None}
        self._heard = {True: report.is_heard, False: lambda: False}
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        reports = epoch % 2 == 0
        report._update().send = self._told[reports]  # type: ignore[method-assign]
        report.is_heard = self._heard[reports]
        self._began_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch >= WARM_UP:
            self.seconds[epoch % 2 == 0].append(time.perf_counter() - self._began_s)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=42, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="per epoch; default %(default)s")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="samples per rank and step; default %(default)s"
    )
    arguments = parser.parse_args()
    hvdtrain.init()
    if not report.is_heard():
        raise SystemExit("start this program with hvdtrain run, which receives the reports")
    model = build_model("lenet")
    images, labels = synthetic_data(model, arguments.steps * arguments.batch_size * hvdtrain.size())
    hvdtrain.distribute(model)
    alternating = AlternatingReports()
    options = {"batch_size": arguments.batch_size, "epochs": arguments.epochs, "verbose": 0}
    model.fit(images, labels, shuffle=False, callbacks=[alternating], **options)
    if not hvdtrain.is_chief():
        return
    reporting, silent = (
        statistics.median(seconds) / arguments.steps for seconds in alternating.seconds.values()
    )
    print(f"a step with reports takes {reporting * 1e3:.3f} ms, without {silent * 1e3:.3f} ms")
    print(f"reports cost {reporting / silent - 1:+.2%} (target: at most 1 %)")


if __name__ == "__main__":
    main()
