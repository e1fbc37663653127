"""``StepLog``: training progress in the format of TensorFlow's classic programs."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import ConfigurationError
from hvdtrain.keras.progress_report import LossSum
from hvdtrain.monitor.progress_bar import (
    StatusLine,
    TrainingSpeed,
    format_progress,
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

    Only the chief prints. In an elastic job that loses its chief, the next chief continues after
    its first step.

    - Steps are counted through all epochs, and through later calls of ``fit``.
    - A line shows the chief's average loss since the last line; the bar shows its average loss of
      the epoch so far.
    - The number of examples is the chief's times the number of ranks. The time for validation and
      between epochs is excluded.
    - An epoch's results are equal to those in the history, and exact over all ranks after
      ``hvdtrain.distribute``.

    Pass ``verbose=0`` to ``fit`` to turn off Keras' own progress bar. Without ``hvdtrain.init()``
    the callback works for a single process.

    Args:
        every: The number of steps between lines.

    Raises:
        ConfigurationError: ``every`` is not an integer above 0.
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
        """Measure the terminal."""
        self._line = StatusLine(sys.stdout, terminal_columns(sys.stdout))
        self._resumes = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the average loss of the bar."""
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
            # Without the loss, as reading it would wait for the device.
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
        """Remove the bar."""
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
        """Return the steps of this epoch; Keras counts a short last block as a full one."""
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
