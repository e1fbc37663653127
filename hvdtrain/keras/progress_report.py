"""Progress reports of ``fit`` to the launcher."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain import world
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import loss_tracker

__all__ = ["LossSoFar", "ReportProgress", "number_of"]


@dataclass(frozen=True, kw_only=True)
class LossSoFar:
    """This rank's steps, rows and sum of losses in this epoch so far, by Keras' own loss metric."""

    steps: int = 0
    rows: float = 0.0
    loss_sum: float = 0.0

    @classmethod
    def of(cls, model: keras.Model, steps: int) -> LossSoFar:
        """Read a model's metric after so many steps of an epoch; waits for the device."""
        # The mean of the losses, weighted by rows: the only place where Keras keeps the rows.
        tracker = loss_tracker(model)
        if tracker is None:
            return cls(steps=steps)
        return cls(steps=steps, rows=number_of(tracker.count), loss_sum=number_of(tracker.total))

    def loss(self, logs: Any) -> float:
        """Return the average; where a user's train_step keeps none, what it reports, or NaN."""
        return (
            self.loss_sum / self.rows
            if self.rows > 0
            else float((logs or {}).get("loss", math.nan))
        )


def number_of(variable: Any) -> float:
    """The value of a variable of one element."""
    return float(keras.ops.convert_to_tensor(variable))


class ReportProgress(keras.callbacks.Callback):
    """Tells the launcher how far ``fit`` is, which notices with that when a rank hangs."""

    def __init__(self, epochs: EpochIterator) -> None:
        super().__init__()
        self._epochs = epochs
        self._epoch = 0
        self._compiled = False
        self._learned = _Learned()

    @property
    def _tells(self) -> bool:
        return report.is_heard() and world.is_chief()

    def on_train_begin(self, logs: Any = None) -> None:
        report.phase("compiling")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._learned.begin_epoch()
        if self._compiled:
            report.phase("training")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch and not self._compiled and self._tells:
            # Resumed within an epoch: the metric holds the rows of an earlier run.
            self._learned.resume(self.model, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._compiled = True
        report.step(self._epochs.step, self._epoch)
        report.planned(self._total_steps(batch + 1))
        report.phase("training")
        self._epochs.input_wait.tell_often()
        if self._tells and self._learned.is_due():
            self._learned.tell(self.model, batch + 1, self._epochs.step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs.input_wait.tell()
        self._learned.end_epoch(self._epochs.step)
        report.phase("end of an epoch")

    def _total_steps(self, done: int) -> int | None:
        """The step with which ``fit`` ends unless it ends early; ``done`` are of this epoch."""
        steps = self._epochs.steps_per_epoch
        if steps is None or self.params is None:
            return None
        epochs_left = self.params["epochs"] - self._epoch
        return self._epochs.step - done + epochs_left * steps


class _Learned:
    """The samples that the ranks have trained on, and their loss, read about once a second.

    Reading waits for the device. Samples are the chief's times the number of ranks.
    """

    def __init__(self) -> None:
        self._due_s = 0.0
        self._samples = 0.0
        self._rows_per_step = 0.0
        self._step: int | None = None
        self._loss = 0.0
        self._before = LossSoFar()

    def is_due(self) -> bool:
        """Whether it is time to read."""
        return time.monotonic() >= self._due_s

    def begin_epoch(self) -> None:
        """Begin again with Keras' metric; what it held last of the epoch before was not read."""
        self._before = LossSoFar()

    def resume(self, model: keras.Model, steps: int) -> None:
        """Leave out the first ``steps`` of the epoch."""
        self._before = LossSoFar.of(model, steps)

    def tell(self, model: keras.Model, steps: int, step: int) -> None:
        """Read and report after so many ``steps`` of the epoch, and ``step`` of the training."""
        self._due_s = time.monotonic() + report.INTERVAL_S
        before, self._before = self._before, LossSoFar.of(model, steps)
        rows = self._before.rows - before.rows
        if rows <= 0:
            return
        self._rows_per_step = rows / max(1, self._before.steps - before.steps)
        if self._step is None:
            self._step = step - steps + before.steps
        self._count(step)
        self._loss = (self._before.loss_sum - before.loss_sum) / rows
        report.learned(self._samples, self._loss)

    def end_epoch(self, step: int) -> None:
        """Report the samples of the steps since the last reading, without reading again."""
        if self._step is not None:
            self._count(step)
            report.learned(self._samples, self._loss)

    def _count(self, step: int) -> None:
        if self._step is not None:
            self._samples += (step - self._step) * self._rows_per_step * world.size()
            self._step = step
