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

__all__ = ["LossSum", "ReportProgress"]


@dataclass(frozen=True)
class LossSum:
    """Steps, rows and the sum of their losses on this rank, from Keras' loss metric."""

    steps: int = 0
    rows: float = 0.0
    total: float = 0.0

    @classmethod
    def read(cls, model: keras.Model, steps: int) -> LossSum:
        """Read the metric after ``steps`` of an epoch; waits for the device."""
        tracker = loss_tracker(model)  # a mean weighted by rows
        if tracker is None:
            return cls(steps)
        rows, total = (
            float(keras.ops.convert_to_tensor(v)) for v in (tracker.count, tracker.total)
        )
        return cls(steps, rows, total)

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.steps + other.steps, self.rows + other.rows, self.total + other.total)

    def __sub__(self, other: LossSum) -> LossSum:
        return LossSum(self.steps - other.steps, self.rows - other.rows, self.total - other.total)

    def mean(self, logs: Any) -> float:
        """Return the mean loss, or the loss in ``logs`` if a ``train_step`` keeps no metric."""
        return (
            self.total / self.rows if self.rows > 0 else float((logs or {}).get("loss", math.nan))
        )


class ReportProgress(keras.callbacks.Callback):
    """Reports the progress of ``fit`` to the launcher, which detects hanging ranks by it.

    About once a second, as reading it waits for the device, the chief also reports its loss and the
    number of samples: its own, times the number of ranks.
    """

    def __init__(self, epochs: EpochIterator) -> None:
        super().__init__()
        self._epochs = epochs
        self._epoch = 0
        self._compiled = False
        self._due_s = 0.0
        self._samples = 0.0
        self._counted_step: int | None = None  # the samples are those up to this step
        self._rows_per_step = 0.0
        self._loss = 0.0
        self._last = LossSum()

    def on_train_begin(self, logs: Any = None) -> None:
        """Report that the first step compiles."""
        report.phase("compiling")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to read Keras' metric from zero."""
        self._epoch = epoch
        self._last = LossSum()
        if self._compiled:
            report.phase("training")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Exclude earlier steps of a resumed epoch."""
        if batch and not self._compiled and self._reads_loss():
            self._last = LossSum.read(self.model, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the step."""
        self._compiled = True
        report.step(self._epochs.step, self._epoch)
        report.planned(self._total_steps(batch + 1))
        report.phase("training")
        self._epochs.input_wait.report_if_due()
        if self._reads_loss() and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + report.INTERVAL_S
            self._read_loss(batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the samples of the epoch."""
        self._epochs.input_wait.report()
        self._report_samples()
        report.phase("end of an epoch")

    def _reads_loss(self) -> bool:
        return report.is_heard() and world.is_chief()

    def _read_loss(self, steps: int) -> None:
        before, self._last = self._last, LossSum.read(self.model, steps)
        new = self._last - before
        if new.rows <= 0:
            return
        self._rows_per_step = new.rows / max(1, new.steps)
        self._loss = new.total / new.rows
        if self._counted_step is None:
            self._counted_step = self._epochs.step - new.steps
        self._report_samples()

    def _report_samples(self) -> None:
        """Report the samples so far; estimate those since the last reading by its rows per step."""
        if self._counted_step is not None:
            new_steps = self._epochs.step - self._counted_step
            self._samples += new_steps * self._rows_per_step * world.size()
            self._counted_step = self._epochs.step
            report.learned(self._samples, self._loss)

    def _total_steps(self, epoch_step: int) -> int | None:
        """Return the last step of ``fit``, unless it stops early; None if unknown."""
        steps = self._epochs.steps_per_epoch
        if steps is None or self.params is None:
            return None
        epochs_left = self.params["epochs"] - self._epoch
        return self._epochs.step - epoch_step + epochs_left * steps
