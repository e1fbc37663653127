"""``StepLog``: the chief tells how training goes, in the form of TensorFlow's classic programs."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import ConfigurationError
from hvdtrain.keras.progress_report import LossSoFar, number_of
from hvdtrain.monitor.progress_bar import (
    EpochProgress,
    Pace,
    StatusLine,
    draw,
    terminal_columns,
)

__all__ = ["StepLog"]

_REDRAW_S = 0.1


class StepLog(keras.callbacks.Callback):
    """Prints a line every few steps, the results of each epoch, and a progress bar on a terminal.

    ::

        step 120, loss = 0.31 (5632.1 examples/sec; 0.023 sec/batch)
        epoch 4/10: accuracy = 0.9812, loss = 0.2941, val_accuracy = 0.9745, val_loss = 0.3012
        epoch 5/10 [=====.......................] 6/32 loss = 0.29, ETA 1 s, 5610 samples/s

    Steps count on through all epochs, and through a later ``fit``. The loss is the chief's
    average since the last line. Examples are those of all ranks, taken as the chief's times the
    number of ranks. Validation and the time between epochs do not count. The epoch's results are
    those that ``fit`` reports: exact over all ranks after ``hvdtrain.distribute``. The bar has the
    chief's average loss of the epoch, the time to the epoch's end, and the speed of late.

    Other ranks print nothing; in an elastic job that has lost its chief the new one goes on after
    its first step. Without ``hvdtrain.init()`` it works for the one process there is.
    Pass ``verbose=0`` to ``fit``, or Keras prints its own progress as well.

    Args:
        every: Steps between two lines.

    Raises:
        ConfigurationError: ``every`` is not a whole number above 0.
    """

    def __init__(self, every: int = 10) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ConfigurationError(
                f"StepLog(every={every!r}) can't print; expected a whole number above 0."
            )
        self._every = every
        self._measures = False  # whether what led up to the step in work is known
        self._first_step = 0
        self._resumes = False
        self._epoch = 0
        self._interval = _Interval()
        self._pace = Pace()
        self._seen = LossSoFar()
        self._marked_s = 0.0
        self._drawn_s = -math.inf
        self._line = StatusLine(sys.stdout, 0)

    def on_train_begin(self, logs: Any = None) -> None:
        columns = terminal_columns(sys.stdout)
        self._line = StatusLine(sys.stdout, columns)
        self._resumes = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._seen = LossSoFar()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        measured, self._measures = self._measures, _is_chief()
        begins = self._measures and not measured
        if self._resumes:
            # By now training stands where it was resumed, perhaps within an epoch.
            self._resumes = False
            self._first_step = _iterations(self.model) - batch
            begins = True
        if begins:
            # Also when the chief was lost: what this rank tells begins with its first step as such.
            self._seen = LossSoFar.of(self.model, batch) if batch else LossSoFar()
        if begins or self._seen.steps == 0:
            self._marked_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._measures:
            # Reading the loss would keep this rank waiting for its device.
            self._seen = LossSoFar(steps=self._done(batch))
            return
        now_s = time.perf_counter()
        before, self._seen = self._seen, LossSoFar.of(self.model, self._done(batch))
        self._interval.add(before, self._seen, now_s - self._marked_s, _ranks())
        self._pace.add(
            self._seen.steps - before.steps,
            (self._seen.rows - before.rows) * _ranks(),
            now_s - self._marked_s,
        )
        self._marked_s = now_s
        step = self._first_step + self._seen.steps
        if step // self._every > (self._first_step + before.steps) // self._every:
            self._line.print(self._interval.describe(step, logs))
            self._interval = _Interval()
        if now_s - self._drawn_s > _REDRAW_S and not self._keras_draws():
            self._drawn_s = now_s
            self._line.show(draw(self._progress(logs), self._line.columns))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._first_step += self._seen.steps
        if not _is_chief():
            return
        self._line.clear()
        results = ", ".join(
            f"{name} = {float(value):.4f}"
            for name, value in (logs or {}).items()
            if name != "learning_rate"
        )
        self._line.print(f"epoch {epoch + 1}/{self._epochs()}: {results}")

    def on_train_end(self, logs: Any = None) -> None:
        self._line.clear()

    def _done(self, batch: int) -> int:
        """Steps of this epoch; Keras counts the last steps_per_execution as if it were full."""
        done, total = batch + 1, (self.params or {}).get("steps") or 0
        # An epoch in which ranks were lost may have more steps than Keras knows.
        return total if 0 < done - total < self.model.steps_per_execution else done

    def _progress(self, logs: Any) -> EpochProgress:
        return EpochProgress(
            epoch=self._epoch + 1,
            epochs=self._epochs(),
            done=self._seen.steps,
            steps=(self.params or {}).get("steps") or 0,
            loss=self._seen.loss(logs),
            rate=self._pace.rate,
            step_s=self._pace.step_s,
        )

    def _epochs(self) -> int:
        return int((self.params or {}).get("epochs") or 1)

    def _keras_draws(self) -> bool:
        return bool((self.params or {}).get("verbose"))


class _Interval:
    """The steps, examples, loss and seconds since the last line."""

    def __init__(self) -> None:
        self._steps = 0
        self._rows = 0.0
        self._examples = 0.0  # of all ranks
        self._loss_sum = 0.0
        self._seconds = 0.0

    def add(self, before: LossSoFar, now: LossSoFar, seconds: float, ranks: int) -> None:
        self._steps += now.steps - before.steps
        self._rows += now.rows - before.rows
        self._examples += (now.rows - before.rows) * ranks
        self._loss_sum += now.loss_sum - before.loss_sum
        self._seconds += seconds

    def describe(self, step: int, logs: Any) -> str:
        per_batch = f"{self._seconds / self._steps:.3f} sec/batch"
        if self._rows <= 0:
            # A train_step of the user's that keeps no loss metric: what it reports, if anything.
            loss = float((logs or {}).get("loss", math.nan))
            return f"step {step}, loss = {loss:.2f} ({per_batch})"
        loss = self._loss_sum / self._rows
        rate = self._examples / max(self._seconds, 1e-9)
        return f"step {step}, loss = {loss:.2f} ({rate:.1f} examples/sec; {per_batch})"


def _is_chief() -> bool:
    """Whether this rank is the chief; in an elastic job another may be it from some step on."""
    return not world.is_initialized() or world.is_chief()


def _ranks() -> int:
    return world.size() if world.is_initialized() else 1


def _iterations(model: keras.Model) -> int:
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return 0 if iterations is None else int(number_of(iterations))
