"""Training progress: reports of ``fit`` to the launcher, and ``StepLog``."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import ConfigurationError
from hvdtrain.monitor import report
from hvdtrain.monitor.progress_bar import (
    StatusLine,
    TrainingSpeed,
    format_progress,
    terminal_columns,
)
from hvdtrain.private_api.keras import loss_tracker
from hvdtrain.trainer.epoch_iterator import EpochIterator

__all__ = ["LossSum", "ReportProgress", "StepLog"]

_REDRAW_S = 0.1


@dataclass(frozen=True)
class LossSum:
    """The steps, rows and sum of losses on this rank, from Keras' loss metric."""

    steps: int = 0
    rows: float = 0.0
    total: float = 0.0

    @classmethod
    def read(cls, model: keras.Model, steps: int) -> LossSum:
        """Read Keras' loss metric after ``steps`` steps of an epoch. This waits for the device."""
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
        """Return the mean loss, or the loss in ``logs`` if ``train_step`` updates no metric."""
        return (
            self.total / self.rows if self.rows > 0 else float((logs or {}).get("loss", math.nan))
        )


class ReportProgress(keras.callbacks.Callback):
    """Reports the progress of ``fit`` to the launcher, so that it can detect hanging ranks.

    The chief also reports its loss and the number of samples. It counts its own samples and
    multiplies them by the number of ranks. These reports are sent only about once a second, because
    reading the loss waits for the device.
    """

    def __init__(self, epochs: EpochIterator) -> None:
        super().__init__()
        self._epochs = epochs
        self._epoch = 0
        self._compiled = False
        self._due_s = 0.0
        self._samples = 0.0
        self._counted_step: int | None = None  # the step up to which samples are counted
        self._rows_per_step = 0.0
        self._loss = 0.0
        self._last = LossSum()

    def on_train_begin(self, logs: Any = None) -> None:
        """Report that training begins, and that the first step includes compilation."""
        report.phase("compiling")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the loss, because Keras resets its own loss metric at the same time."""
        self._epoch = epoch
        self._last = LossSum()
        if self._compiled:
            report.phase("training")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Exclude the steps that an earlier run completed, if training resumes within an epoch."""
        if batch and not self._compiled and self._reads_loss():
            self._last = LossSum.read(self.model, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report that a step has ended."""
        self._compiled = True
        report.step(self._epochs.step, self._epoch)
        report.planned(self._total_steps(batch + 1))
        report.phase("training")
        self._epochs.input_wait.report_if_due()
        if self._reads_loss() and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + report.INTERVAL_S
            self._read_loss(batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the number of samples in the epoch."""
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
        """Report the number of samples so far.

        The loss metric, which contains this number, is read only about once a second. Samples since
        the last time are estimated from the number of rows per step at that time.
        """
        if self._counted_step is not None:
            new_steps = self._epochs.step - self._counted_step
            self._samples += new_steps * self._rows_per_step * world.size()
            self._counted_step = self._epochs.step
            report.learned(self._samples, self._loss)

    def _total_steps(self, epoch_step: int) -> int | None:
        """Return the number of the last step of this ``fit``, or None if it is unknown."""
        steps = self._epochs.steps_per_epoch
        if steps is None or self.params is None:
            return None
        epochs_left = self.params["epochs"] - self._epoch
        return self._epochs.step - epoch_step + epochs_left * steps


class StepLog(keras.callbacks.Callback):
    """Prints a line every few steps, the results of each epoch, and a progress bar on a terminal.

    ::

        step 120, loss = 0.31 (5632.1 examples/sec; 0.023 sec/batch)
        epoch 4/10: accuracy = 0.9812, loss = 0.2941, val_accuracy = 0.9745, val_loss = 0.3012
        epoch 5/10 [=====.......................] 6/32 loss = 0.29, ETA 1 s, 5610 samples/s

    Only the chief prints. If an elastic job loses its chief, the next chief takes over the printing
    after its first step as the chief.

    - Step numbers don't start again in a new epoch or a later call of ``fit``.
    - A line shows the chief's average loss since the last line. The progress bar shows the chief's
      average loss in the epoch so far.
    - The number of examples is the chief's number times the number of ranks. The time of
      validation, and the time between epochs, are not included.
    - The results of an epoch are the same as in the history that ``fit`` returns. For a model that
      was passed to ``hvdtrain.distribute``, they are the exact results over all ranks.

    Pass ``verbose=0`` to ``fit`` to turn off Keras' own progress bar. The callback also works in a
    single process without ``hvdtrain.init()``.

    Args:
        every: The number of steps between lines.

    Raises:
        ConfigurationError: If ``every`` is not an integer above 0.
    """

    def __init__(self, every: int = 10) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ConfigurationError(
                f"StepLog got every={every!r}, expected a whole number above 0."
            )
        self._every = every
        self._measures = False  # whether this rank was the chief when the current step began
        self._first_step = 0
        self._resumes = False
        self._epoch = 0
        self._speed = TrainingSpeed()
        self._last = LossSum()
        self._clear_interval()
        self._marked_s = 0.0
        self._drawn_s = -math.inf
        self._line = StatusLine(sys.stdout, 0)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out the width of the terminal."""
        self._line = StatusLine(sys.stdout, terminal_columns(sys.stdout))
        self._resumes = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the average loss that the progress bar shows."""
        self._epoch = epoch
        self._last = LossSum()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the clock before the first step."""
        measured, self._measures = self._measures, not world.is_initialized() or world.is_chief()
        begins = self._measures and not measured
        if self._resumes:
            # Training has been resumed by now, possibly within an epoch.
            self._resumes = False
            iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
            step = 0 if iterations is None else int(keras.ops.convert_to_tensor(iterations))
            self._first_step = step - batch
            begins = True
        if begins:
            # Exclude the steps before this one, which were not measured.
            self._last = LossSum.read(self.model, batch) if batch else LossSum()
        if begins or self._last.steps == 0:
            self._marked_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print a line if it is due, and redraw the bar."""
        if not self._measures:
            # Don't read the loss, because this would wait for the device.
            self._last = LossSum(self._done(batch))
            return
        now_s = time.perf_counter()
        before, self._last = self._last, LossSum.read(self.model, self._done(batch))
        new, seconds, self._marked_s = self._last - before, now_s - self._marked_s, now_s
        examples = new.rows * (world.size() if world.is_initialized() else 1)
        self._interval += new
        self._examples += examples
        self._seconds += seconds
        self._speed.add(new.steps, examples, seconds)
        step = self._first_step + self._last.steps
        if step // self._every > (self._first_step + before.steps) // self._every:
            self._line.print(self._describe(step, logs))
            self._clear_interval()
        if now_s - self._drawn_s > _REDRAW_S and not (self.params or {}).get("verbose"):
            self._drawn_s = now_s
            self._line.show(self._progress(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the results of the epoch."""
        self._first_step += self._last.steps
        if world.is_initialized() and not world.is_chief():
            return
        self._line.clear()
        results = ", ".join(
            f"{name} = {float(value):.4f}"
            for name, value in (logs or {}).items()
            if name != "learning_rate"
        )
        self._line.print(f"epoch {epoch + 1}/{self._epochs()}: {results}")

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the progress bar."""
        self._line.clear()

    def _clear_interval(self) -> None:
        self._interval = LossSum()  # since the last line
        self._examples = 0.0  # of all ranks
        self._seconds = 0.0

    def _describe(self, step: int, logs: Any) -> str:
        loss = self._interval.mean(logs)
        rate = self._examples / max(self._seconds, 1e-9)
        # The rate is unknown for a train_step that keeps no loss metric.
        speed = f"{rate:.1f} examples/sec; " if self._interval.rows > 0 else ""
        per_batch = self._seconds / self._interval.steps
        return f"step {step}, loss = {loss:.2f} ({speed}{per_batch:.3f} sec/batch)"

    def _done(self, batch: int) -> int:
        """Return the completed steps of this epoch. Keras counts a short last block as full."""
        done, total = batch + 1, (self.params or {}).get("steps") or 0
        # Not min(): an epoch in which ranks were lost may have more steps than Keras knows.
        return total if 0 < done - total < self.model.steps_per_execution else done

    def _progress(self, logs: Any) -> str:
        return format_progress(
            self._line.columns,
            epoch=self._epoch + 1,
            epochs=self._epochs(),
            done=self._last.steps,
            steps=(self.params or {}).get("steps") or 0,
            loss=self._last.mean(logs),
            samples_per_s=self._speed.samples_per_s,
            step_s=self._speed.step_s,
        )

    def _epochs(self) -> int:
        return int((self.params or {}).get("epochs") or 1)
