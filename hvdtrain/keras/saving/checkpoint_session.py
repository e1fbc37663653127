"""The checkpoints of one ``fit``: taking them, and resuming from one."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.checkpoint.store import BackgroundWriter
from hvdtrain.errors import CheckpointError, Preempted
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.membership import Change, Membership
from hvdtrain.keras.saving.callback_states import stopped_early
from hvdtrain.keras.saving.checkpoint_schedule import (
    CheckpointOptions,
    CheckpointSchedule,
    PreemptionSignals,
)
from hvdtrain.keras.saving.resume import move, restore
from hvdtrain.keras.saving.training_progress import (
    TrainingProgress,
    WorkerPosition,
    take_snapshot,
)
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import set_initial_epoch

__all__ = ["CheckpointSession"]

logger = logging.getLogger(__package__)

# After an error in fit: the job is about to end, too.
CLOSE_TIMEOUT_S = 4.0


class CheckpointSession:
    """Takes the checkpoints of one ``fit``; every rank has one.

    Args:
        state: The state of the training; its collectives connect the ranks that decide together.
        store: The directory; only the chief uses it.
        found: The checkpoint to resume from: its progress and, on the chief, all of it. None to
            start from the beginning.
        averaging: Knows whether all ranks have the same weights, if they don't always. A checkpoint
            that can wait waits until they do, so that it changes nothing.
        join: Makes the weights of all ranks equal, between two steps; collective.
    """

    _epochs: EpochIterator
    """The iterator over ``fit``'s data; set by ``running``."""
    _seed: int
    """The seed of the data's orders; set by ``running``."""

    def __init__(
        self,
        options: CheckpointOptions,
        state: TrainingState,
        membership: Membership,
        store: Store,
        found: tuple[TrainingProgress, Snapshot | None] | None,
        averaging: WeightAveraging | None = None,
        join: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._state = state
        self._membership = membership
        # Until the first epoch has begun, or the training is over.
        self._saved = found[0] if found else None
        self._snapshot = found[1] if found else None
        self._averaging = averaging
        self._join = join
        self._schedule = CheckpointSchedule(options.every_steps, options.every_s)
        self.writer = BackgroundWriter(store, report.saved)
        self.paused_s: list[float] = []
        """The seconds for which each checkpoint paused training; on the chief."""
        self._complained_after: int | None = None  # the number of checkpoints written then
        self._signals = PreemptionSignals()
        self._preempted = False
        self._epoch = 0  # the current or next one
        self._epoch_step = 0  # completed steps of it
        self._logs: Mapping[str, Any] | None = None  # of an epoch that has just ended
        self._step_before = 0
        self._waits = False  # one is due as soon as all ranks have the same weights
        # For the current validation: this rank's values before it, its steps, when to synchronize.
        self._before_validation: Mapping[str, np.ndarray] | None = None
        self._validation_steps = 0
        self._validation_schedule = CheckpointSchedule(None, None)

    def seed(self, fresh: int) -> int:
        """Return the seed of the data's orders: the checkpoint's, or ``fresh`` without one."""
        return fresh if self._saved is None else self._saved.seed

    @contextmanager
    def running(self, epochs: EpochIterator, seed: int) -> Iterator[None]:
        """Let signals end training after a step, not the process, within the block.

        Args:
            epochs: The iterator over the data; moved to where the checkpoint was taken.
            seed: The seed of the data's orders.

        Raises:
            CheckpointError: The checkpoint belongs to another kind of data.
        """
        if self._saved is not None:
            move(epochs, self._saved, self._warn)
        self._epochs, self._seed = epochs, seed
        self._step_before = epochs.step
        self._schedule.begin(epochs.step, time.monotonic())
        self._signals.catch()
        try:
            with self._membership.notifying([self._take_over]):
                yield
        finally:
            set_initial_epoch(self._state.model, None)
            self.writer.wait(CLOSE_TIMEOUT_S)
            self._signals.release(handled=self._preempted)

    def on_train_begin(self, epochs: int) -> None:
        """Set the first epoch of a resumed training; restore the state if none of it is done.

        Args:
            epochs: How many epochs ``fit`` is to end with.
        """
        saved = self._saved
        if saved is None:
            return
        set_initial_epoch(self._state.model, saved.epoch)
        if not saved.within_epoch:
            self._restore(saved)
        place = saved.place
        where = f"the checkpoint of step {saved.step} in {self._options.directory}"
        complete = ""
        if saved.epoch >= epochs:
            complete = f"has all {epochs} epochs; ask for more epochs"
        elif not saved.within_epoch and self._stopped_early(saved.epoch):
            set_initial_epoch(self._state.model, epochs)
            complete = (
                f"is of epoch {saved.epoch}, with which EarlyStopping ended; raise its patience"
            )
        if complete:
            self._say(
                f"nothing is left to train: {where} {complete}, or name a new directory to start "
                "over"
            )
        else:
            ranks = f"; ranks then: {place.ranks}" if place.ranks != self._membership.size else ""
            self._say(
                f"resuming from {where} (epoch {saved.epoch + 1}, {place.epoch_step} steps "
                f"of it done{ranks})"
            )
        if not saved.within_epoch:
            # The job that saved it may have ended before the export.
            self._export()

    def on_epoch_begin(self, epoch: int) -> None:
        """Note the epoch; the first time, finish resuming.

        In the middle of an epoch the state is restored now, after Keras and callbacks have set up.
        """
        self._epoch, self._epoch_step, self._logs = epoch, 0, None
        self._before_validation = None
        if self._saved is not None:
            if self._saved.within_epoch:
                self._restore(self._saved)
            self._epoch_step = self._saved.place.epoch_step
            self._end_resuming(self._saved)

    def on_batch_end(self, batch: int) -> None:
        """Take a checkpoint if one is due or a rank has received a signal."""
        self._epoch_step = batch + 1
        step, before = self._epochs.step, self._step_before
        self._step_before = step
        if self._membership.too_few is not None:
            self._save_for_good()
        elif self._schedule.meets(step, before) or (self._waits and self._joined):
            self._take_if_asked(due=self._schedule.is_due(step, before))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any], *, last: bool) -> None:
        """Take a checkpoint at the end of the training, and of other epochs if one is due or waits.

        At the very end Keras may overwrite weights by their averages: that comes after this.
        """
        stops = bool(self._state.model.stop_training)
        last = last or stops or self._membership.too_few is not None
        self._epoch, self._epoch_step, self._logs = epoch + 1, 0, logs
        if last:
            self._wait_for_others(stop=stops)
        if not (last or self._schedule.every_epoch or self._waits):
            return
        self._waits = False
        if last and self._membership.elastic:
            self._save_for_good()
        else:
            self._take()
        self._export()
        if last and (number := self._meet()[0]):
            self._end(number)

    def on_test_begin(self) -> None:
        """Keep this rank's own values: a validation overwrites the metrics."""
        swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in self._state.callbacks)
        # While averages replace the weights, nothing can be saved.
        if self._before_validation is None and not swaps:
            self._before_validation = self._state.copy_own()
            self._validation_steps = 0
            self._validation_schedule = CheckpointSchedule(None, None)
            self._validation_schedule.begin(0, time.monotonic())

    def on_test_batch_end(self) -> None:
        """After a signal to any rank, take a checkpoint of the last training step and end.

        The validation may take longer than the sender of the signal waits; the resumed training
        repeats it.
        """
        before, schedule = self._before_validation, self._validation_schedule
        if before is None:
            return
        self._validation_steps += 1
        step = self._validation_steps
        word = np.array([self._signal(), 0])
        if not schedule.meets(step, step):
            return
        if self._state.collectives.rank == 0:
            word[1] = schedule.steps_ahead(step, time.monotonic())
        number, ahead = self._state.collectives.allreduce(word, "max", name="whether to end")
        schedule.look_again(step + int(ahead))
        if number:
            self._take(before)
            self._end(int(number))

    def on_train_end(self) -> None:
        """Wait until the last checkpoint is on disk, or has failed."""
        if self._saved is not None:
            self._end_resuming(self._saved)
        self._save_together(self.writer.wait)
        self._meet()

    def _end_resuming(self, saved: TrainingProgress) -> None:
        """Restore the history that ``fit`` returns; Keras clears it when training begins."""
        report.resumed(saved.step)
        history, logs = self._state.model.history, saved.history["logs"]
        history.history = {name: list(values) for name, values in logs.items()}
        history.epoch = list(saved.history["epoch"])
        self._saved = self._snapshot = None

    def _take_over(self, change: Change) -> None:
        """Write checkpoints from now on, if the chief is lost and this rank is the next one."""
        if self._membership.is_chief and change.lost_chief:
            # This rank can't know whether the newest one reached the disk.
            self._schedule.begin(self._epochs.step, time.monotonic(), overdue=True)
            self._say(f"checkpoints are written to {self._options.directory} by another rank now")

    # Synchronizing with the other ranks.

    def _take_if_asked(self, *, due: bool = False) -> None:
        """Synchronize; take a checkpoint if it is time, and end after a signal.

        ``due`` is as for ``_meet``.
        """
        number, take = self._meet(due=due)
        if number or take:
            self._take()
        if number:
            self._end(number)

    def _meet(self, *, due: bool = False) -> tuple[int, bool]:
        """Synchronize with the other ranks; ``due`` is whether a checkpoint is due by steps.

        Returns:
            A signal that a rank received, or 0; and whether to take a checkpoint now.

        Raises:
            CheckpointError: The chief could not write, and ``on_error`` is "raise".
        """
        step = self._epochs.step
        word = np.zeros(4, np.int64)
        word[0] = self._signal()
        error = None
        if self._membership.is_chief:
            error = self.writer.take_error()
            now_s = time.monotonic()
            word[1] = self._schedule.is_overdue(now_s, due=due) and not self.writer.busy
            word[2] = self._schedule.steps_ahead(step, now_s)
            word[3] = error is not None and self._options.on_error == "raise"
        number, wanted, ahead, failed = self._state.collectives.allreduce(
            word, "max", name="whether to save"
        )
        self._schedule.look_again(step + int(ahead))
        if failed:
            text = str(error or "The chief could not save a checkpoint.")
            reason = self._state.collectives.broadcast_object(
                text, name="checkpoint's error", replicated=True
            )
            raise CheckpointError(reason)
        if error is not None:
            self._complain(error)
        take = bool(wanted) and self._joined
        self._waits = bool(wanted) and not take
        return int(number), take

    def _end(self, number: int) -> None:
        """End the program after a signal, once the checkpoint is on disk; collective."""
        name = signal.Signals(number).name
        self._save_together(self.writer.wait)
        if self._membership.is_chief:
            error = self.writer.take_error()
            if error is None:
                self._say(
                    f"received {name}; the checkpoint of step {self._epochs.step} is in "
                    f"{self._options.directory}. Start the program again to resume"
                )
            else:
                self._warn(f"received {name}, and no checkpoint could be saved: {error}")
        self._preempted = True
        raise Preempted(number)

    @property
    def _joined(self) -> bool:
        """Whether all ranks have the same weights now, so that they can be saved as they are."""
        return self._averaging is None or self._averaging.joined

    # Taking a checkpoint.

    def _take(self, earlier: Mapping[str, np.ndarray] | None = None) -> None:
        """Copy the state and pass it to the writer; collective.

        Args:
            earlier: This rank's own values after the last step, if they have changed since.
        """
        start_s = time.monotonic()
        with report.during("checkpoint"):
            self._join()
            ranks = self._state.gather_own(earlier)
            while self._membership.renew():
                ranks = self._state.gather_own(earlier)
            # The next copies overwrite those that it writes.
            self._save_together(self.writer.wait)
            if self._membership.is_chief:
                snapshot = take_snapshot(
                    self._state,
                    self._epochs,
                    ranks,
                    self._others(),
                    epoch=self._epoch,
                    epoch_step=self._epoch_step,
                    logs=self._logs,
                    seed=self._seed,
                )
                self.writer.start(snapshot)
        if self._membership.is_chief:
            now_s = time.monotonic()
            self.paused_s.append(now_s - start_s)
            self._schedule.note_taken(now_s)

    def _save_for_good(self) -> None:
        """Take a checkpoint and wait until it is on disk, even if the chief is lost meanwhile."""
        while True:
            self._take()
            self._save_together(self.writer.wait)
            if not self._membership.renew_and_check_chief():
                return

    def _export(self) -> None:
        """Save the model in Keras' own format, on the chief, if ``export`` is set; collective."""
        path = self._options.export

        def export() -> None:
            try:
                if path is not None:
                    _export_model(self._state.model, path)
            except OSError as error:
                self._complain(f"The model can't be saved as {path}: {error.strerror or error}.")

        self._save_together(export)

    def _save_together(self, save: Callable[[], object]) -> None:
        """Run ``save`` on the chief while the others wait without a time-out; collective."""
        with report.during("checkpoint"):
            if self._membership.is_chief:
                self._save(save)
            with self._state.collectives.without_timeout():
                self._state.collectives.barrier(name="the chief saves")

    def _complain(self, error: CheckpointError | str) -> None:
        """Warn once until another checkpoint is written: a full disk stays full for long."""
        written = len(self.writer.written_s)
        if self._complained_after != written:
            self._complained_after = written
            logger.warning("no checkpoint could be saved; training continues: %s", error)

    # Hooks for trainings in which each rank makes its own steps.

    def _save(self, save: Callable[[], object]) -> None:
        """Run ``save``, on the chief."""
        save()

    def _restore(self, saved: TrainingProgress) -> None:
        """Restore the model and the callbacks; collective."""
        restore(saved, self._snapshot, self._state, self._warn)

    def _stopped_early(self, epochs: int) -> bool:
        """Return whether EarlyStopping of any rank ended training after ``epochs``; collective."""
        mine = np.array(stopped_early(self._state.callbacks, epochs))
        return bool(self._state.collectives.allreduce(mine, "max", name="stopped early"))

    def _signal(self) -> int:
        """Return the signal that this rank acts on, or 0."""
        return self._signals.received

    def _others(self) -> Sequence[WorkerPosition]:
        """Return the positions of the others, on the chief; called before it copies the model."""
        return ()

    def _wait_for_others(self, *, stop: bool) -> None:
        """Take checkpoints after this rank's last step while others train.

        Args:
            stop: Whether to end the others as well.
        """

    def _warn(self, text: str) -> None:
        self._say(text, logging.WARNING)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        if self._membership.is_chief:
            logger.log(level, text)


def _export_model(model: keras.Model, path: str) -> None:
    """Save the model; the file at the path is always a whole one: the former or this.

    Raises:
        OSError: It can't be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}-{os.getpid()}.keras")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
