"""``hvdtrain bench checkpoint``: how long checkpoints block the training."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import keras

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.bench.options import CheckpointBenchOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.trainer.saving.checkpoint_session import CheckpointSession

__all__ = ["measure"]

MAX_BLOCKED_PERCENT = 25.0


class _StepTimes(keras.callbacks.Callback):
    """Records when each step ends, and keeps the ``CheckpointSession`` that saves checkpoints."""

    def __init__(self, checkpoint: hvdtrain.Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self.session: CheckpointSession | None = None
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.session = self._checkpoint.session
        self.ends_s.append(time.monotonic())


def measure(options: CheckpointBenchOptions) -> None:
    """Run the benchmark on all ranks. The chief prints and writes the results."""
    hvdtrain.init()
    report = BenchReport("checkpoint", options, world.size(), world.is_chief)
    directory = options.directory or None
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-", dir=directory) as folder:
        watch = _train(options, Path(folder))
        # The size is 0 on ranks without access to the checkpoints.
        newest = sorted(Path(folder).glob("step-*"))[-1:]
        size_bytes = sum(file.stat().st_size for path in newest for file in path.iterdir())
    if world.is_chief():
        _show(report, watch, size_bytes)
        report.finish(options.json)


def _train(options: CheckpointBenchOptions, folder: Path) -> _StepTimes:
    model = build_model("mlp")
    # With Adam, a checkpoint has three times the size of the weights.
    model.compile("adam", model.loss)
    hvdtrain.distribute(model)
    checkpoint = hvdtrain.Checkpoint(folder, every_steps=options.between_steps, keep=1)
    watch = _StepTimes(checkpoint)
    # The final checkpoint, half an interval later, is not counted.
    steps = options.checkpoints * options.between_steps + options.between_steps // 2
    rows = steps * options.batch_size * world.size()
    x, y = synthetic_data(model, rows)
    batch_size = options.batch_size
    model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=[watch, checkpoint])
    return watch


def _show(report: BenchReport, watch: _StepTimes, size_bytes: int) -> None:
    assert watch.session is not None
    paused_s = watch.session.paused_s[:-1]
    written_s = watch.session.writer.written_s[: len(paused_s)]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(watch.ends_s))
    rows = [
        [str(n), format_seconds(paused), format_seconds(written), f"{100 * paused / written:.1f} %"]
        for n, (paused, written) in enumerate(zip(paused_s, written_s), start=1)
    ]
    report.print(
        f"{size_bytes / 1e6:.0f} MB per checkpoint; a step takes {format_seconds(step_s)}\n"
    )
    report.print_table(["checkpoint", "blocking", "writing", "ratio"], rows, left=())
    report.add(paused_s=paused_s, written_s=written_s, step_s=step_s, bytes=size_bytes)
    percent = 100 * statistics.median(p / w for p, w in zip(paused_s, written_s))
    what = "blocking / writing, median"
    report.compare(what, percent, "at most", MAX_BLOCKED_PERCENT, "%")
