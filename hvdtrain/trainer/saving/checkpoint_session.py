"""``CheckpointSession``, which takes the checkpoints of a ``fit`` and resumes from a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.checkpoint.store import BackgroundWriter
from hvdtrain.errors import CheckpointError, Preempted
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import set_initial_epoch
from hvdtrain.trainer.epoch_iterator import EpochIterator
from hvdtrain.trainer.membership import Change, Membership
from hvdtrain.trainer.saving.callback_states import stopped_early
from hvdtrain.trainer.saving.checkpoint_schedule import (
    CheckpointOptions,
    CheckpointSchedule,
    PreemptionSignals,
)
from hvdtrain.trainer.saving.training_progress import (
    TrainingProgress,
    WorkerPosition,
    move_data,
    restore_training,
    take_snapshot,
)
from hvdtrain.trainer.saving.training_state import TrainingState

if TYPE_CHECKING:
    from hvdtrain.trainer.local_sgd.weight_averaging import WeightAveraging

__all__ = ["CheckpointSession"]

logger = logging.getLogger(__package__)

# Seconds to wait for the last write after an error in fit. mpirun and srun end the job soon, but
# hvdtrain run waits until the checkpoint is written.
CLOSE_TIMEOUT_S = 4.0
LAUNCHER_CLOSE_TIMEOUT_S = 60.0


class CheckpointSession:
    """Takes the checkpoints of one ``fit``. Every rank has a session.

    Args:
        options: The arguments of the ``Checkpoint`` callback.
        state: The state of the model. Its collectives connect the ranks, which decide together when
            to save.
        membership: The current ranks.
        store: The checkpoint directory. Only the chief uses it.
        checkpoint: The checkpoint to resume from, or None to start from the beginning. It consists
            of the saved progress and, on the chief only, the complete checkpoint.
        averaging: Averages the weights if they may differ between ranks, otherwise None. If
            possible, a checkpoint is delayed until the weights are equal anyway, so that saving
            doesn't need an additional average.
        join: Function that makes the weights of all ranks equal. All ranks call it together.
    """

    # Set by ``running``.
    _epochs: EpochIterator
    _seed: int

    def __init__(
        self,
        options: CheckpointOptions,
        state: TrainingState,
        membership: Membership,
        store: Store,
        checkpoint: tuple[TrainingProgress, Snapshot | None] | None,
        averaging: WeightAveraging | None = None,
        join: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._state = state
        self._membership = membership
        # These two are set until training has resumed.
        self._saved = checkpoint[0] if checkpoint else None
        self._snapshot = checkpoint[1] if checkpoint else None
        self._averaging = averaging
        self._join = join
        self._schedule = CheckpointSchedule(options.every_steps, options.every_s)
        self.writer = BackgroundWriter(store, report.saved, report.writing)
        self.paused_s: list[float] = []
        """The seconds for which each checkpoint paused training, measured on the chief only."""
        self._warned_after: int | None = None  # number of checkpoints written before the warning
        self._signals = PreemptionSignals()
        self._preempted = False
        self._epoch = 0  # the current or next one
        self._epoch_step = 0  # completed steps of this epoch
        self._logs: Mapping[str, Any] | None = None  # of an epoch that has just ended
        self._step_before = 0
        self._waits = False  # whether a checkpoint is delayed until all ranks have equal weights
        # For validations: this rank's values before it, its steps, and when to synchronize in it.
        self._before_validation: Mapping[str, np.ndarray] | None = None
        self._validation_steps = 0
        self._validation_schedule = CheckpointSchedule(None, None)

    def seed(self, fresh: int) -> int:
        """Return the seed of the data's order: the checkpoint's, or ``fresh`` if none."""
        return fresh if self._saved is None else self._saved.seed

    @contextmanager
    def running(self, epochs: EpochIterator, seed: int) -> Iterator[None]:
        """Move the data to the checkpoint's position, and catch signals in the ``with`` block.

        A caught signal doesn't end the process at once. Training ends after the current step.

        Raises:
            CheckpointError: If the checkpoint belongs to a different kind of data.
        """
        if self._saved is not None:
            move_data(epochs, self._saved, self._warn)
        self._epochs, self._seed = epochs, seed
        self._step_before = epochs.step
        self._schedule.begin(epochs.step, time.monotonic())
        self._signals.catch()
        report.saves_on_signal(self._signals.replace_default)
        try:
            with self._membership.notifying([self._take_over]):
                yield
        finally:
            set_initial_epoch(self._state.model, None)
            self.writer.wait(LAUNCHER_CLOSE_TIMEOUT_S if report.is_heard() else CLOSE_TIMEOUT_S)
            report.saves_on_signal(False)
            self._signals.release(handled=self._preempted)

    def on_train_begin(self, epochs: int) -> None:
        """Set the first epoch if training resumes from a checkpoint.

        If training resumes at the beginning of an epoch, this method also restores the model. If
        training resumes within an epoch, ``on_epoch_begin`` restores it.
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
            complete = f"has completed all {epochs} epochs; increase epochs"
        elif not saved.within_epoch and self._stopped_early(saved.epoch):
            set_initial_epoch(self._state.model, epochs)
            complete = f"was stopped by EarlyStopping in epoch {saved.epoch}; increase its patience"
        if complete:
            self._log(
                f"nothing is left to train: {where} {complete}, or choose another directory to "
                "start over"
            )
        else:
            ranks = f" on {place.ranks} ranks" if place.ranks != self._membership.size else ""
            self._log(
                f"resuming from {where} (epoch {saved.epoch + 1}, {place.epoch_step} steps done"
                f"{ranks})"
            )
        if not saved.within_epoch:
            # The job may have ended between the checkpoint and the export.
            self._export()

    def on_epoch_begin(self, epoch: int) -> None:
        """Restore the model and the callbacks if training resumes within this epoch.

        An earlier restore would be overwritten, because Keras and the callbacks initialize their
        state when training begins.
        """
        self._epoch, self._epoch_step, self._logs = epoch, 0, None
        self._before_validation = None
        if self._saved is not None:
            if self._saved.within_epoch:
                self._restore(self._saved)
            self._epoch_step = self._saved.place.epoch_step
            self._end_resuming(self._saved)

    def on_batch_end(self, batch: int) -> None:
        """Take a checkpoint if one is due, or if a rank has received a signal."""
        self._epoch_step = batch + 1
        step, before = self._epochs.step, self._step_before
        self._step_before = step
        if self._membership.too_few is not None:
            self._save_for_good()
        elif self._schedule.synchronizes(step, before) or (self._waits and self._joined):
            self._take_if_asked(due=self._schedule.is_due(step, before))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any], *, last: bool) -> None:
        """Take a checkpoint at the end of training, and at the end of an epoch if one is due."""
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
        if last and (number := self._synchronize()[0]):
            self._end(number)

    def on_test_begin(self) -> None:
        """Copy this rank's own values before a validation, which overwrites the metrics."""
        swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in self._state.callbacks)
        # SwapEMAWeights replaces the weights by averages, so no checkpoint can be taken.
        if self._before_validation is None and not swaps:
            self._before_validation = self._state.copy_own()
            self._validation_steps = 0
            self._validation_schedule = CheckpointSchedule(None, None)
            self._validation_schedule.begin(0, time.monotonic())

    def on_test_batch_end(self) -> None:
        """If a rank has received a signal, take a checkpoint of the last training step and exit.

        The validation is not completed, because it might last longer than the grace period. When
        training resumes, the validation is repeated.
        """
        before, schedule = self._before_validation, self._validation_schedule
        if before is None:
            return
        self._validation_steps += 1
        step = self._validation_steps
        message = np.array([self._signal(), 0])
        if not schedule.synchronizes(step, step):
            return
        if self._state.collectives.rank == 0:
            message[1] = schedule.steps_ahead(step, time.monotonic())
        number, ahead = self._state.collectives.allreduce(message, "max", name="whether to end")
        schedule.next_look = step + int(ahead)
        if number:
            self._take(before)
            self._end(int(number))

    def on_train_end(self) -> None:
        """Wait until the last checkpoint has been written to the disk."""
        if self._saved is not None:
            self._end_resuming(self._saved)
        self._save_together(self.writer.wait)
        self._synchronize()

    def _end_resuming(self, saved: TrainingProgress) -> None:
        """Restore the history that ``fit`` returns, which Keras has cleared when training began."""
        report.resumed(saved.step)
        history, logs = self._state.model.history, saved.history["logs"]
        history.history = {name: list(values) for name, values in logs.items()}
        history.epoch = list(saved.history["epoch"])
        self._saved = self._snapshot = None

    def _take_over(self, change: Change) -> None:
        """If this rank is the new chief, let it write checkpoints from now on."""
        if self._membership.is_chief and change.lost_chief:
            # The last checkpoint of the lost chief may not have reached the disk.
            self._schedule.begin(self._epochs.step, time.monotonic(), overdue=True)
            self._log(f"another rank now writes checkpoints to {self._options.directory}")

    def _take_if_asked(self, *, due: bool = False) -> None:
        """Synchronize; then take a checkpoint if due, or exit after a signal on any rank."""
        number, take = self._synchronize(due=due)
        if number or take:
            self._take()
        if number:
            self._end(number)

    def _synchronize(self, *, due: bool = False) -> tuple[int, bool]:
        """Decide together with the other ranks whether to take a checkpoint and whether to exit.

        Returns:
            Two values. The first is the number of a signal that any rank has received, or 0. The
            second is whether to take a checkpoint now.
        """
        step = self._epochs.step
        message = np.zeros(4, np.int64)
        message[0] = self._signal()
        error = None
        if self._membership.is_chief:
            error = self.writer.take_error()
            now_s = time.monotonic()
            message[1] = self._schedule.is_overdue(now_s, due=due) and not self.writer.busy
            message[2] = self._schedule.steps_ahead(step, now_s)
            message[3] = error is not None and self._options.on_error == "raise"
        number, wanted, ahead, failed = self._state.collectives.allreduce(
            message, "max", name="whether to save"
        )
        self._schedule.next_look = step + int(ahead)
        if failed:
            text = str(error or "The chief could not save a checkpoint.")
            reason = self._state.collectives.broadcast_object(
                text, name="checkpoint's error", replicated=True
            )
            raise CheckpointError(reason)
        if error is not None:
            self._warn_once(error)
        take = bool(wanted) and self._joined
        self._waits = bool(wanted) and not take
        return int(number), take

    def _end(self, number: int) -> None:
        """Wait until the checkpoint is on the disk, then exit because of a signal, on all ranks."""
        name = signal.Signals(number).name
        self._save_together(self.writer.wait)
        if self._membership.is_chief:
            error = self.writer.take_error()
            if error is None:
                self._log(
                    f"received {name}; the checkpoint of step {self._epochs.step} is in "
                    f"{self._options.directory}. Start the program again to resume"
                )
            else:
                self._warn(f"received {name}, and no checkpoint could be saved: {error}")
        self._preempted = True
        raise Preempted(number)

    @property
    def _joined(self) -> bool:
        """Whether all ranks have the same weights at the moment."""
        return self._averaging is None or self._averaging.joined

    def _take(self, earlier: Mapping[str, np.ndarray] | None = None) -> None:
        """Copy the model's state, and start to write it to the disk. All ranks must call this.

        ``earlier`` contains values from ``TrainingState.copy_own`` to save instead of the current
        ones.
        """
        start_s = time.monotonic()
        with report.during("checkpoint"):
            self._join()
            ranks = self._state.gather_own(earlier)
            while self._membership.renew():
                ranks = self._state.gather_own(earlier)
            # Wait for the previous write, because the copies that it reads will be overwritten.
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
        """Take a checkpoint and wait until it is on the disk. Repeat if the chief is lost."""
        while True:
            self._take()
            self._save_together(self.writer.wait)
            if not self._membership.renew_and_check_chief():
                return

    def _export(self) -> None:
        """Save the model as a ``.keras`` file if ``export`` is set. All ranks must call this."""
        path = self._options.export

        def export() -> None:
            try:
                if path is not None:
                    _export_model(self._state.model, path)
            except OSError as error:
                self._warn_once(f"The model can't be saved as {path}: {error.strerror or error}.")

        self._save_together(export)

    def _save_together(self, save: Callable[[], object]) -> None:
        """Run ``save`` on the chief while the other ranks wait without a time-out."""
        with report.during("checkpoint"):
            if self._membership.is_chief:
                self._save(save)
            with self._state.collectives.without_timeout():
                self._state.collectives.barrier(name="the chief saves")

    def _warn_once(self, error: CheckpointError | str) -> None:
        """Log a warning once until a checkpoint is written, because a disk may stay full."""
        written = len(self.writer.written_s)
        if self._warned_after != written:
            self._warned_after = written
            logger.warning("no checkpoint could be saved; training continues: %s", error)

    # A subclass for modes in which each rank makes its own steps overrides these methods.

    def _save(self, save: Callable[[], object]) -> None:
        save()

    def _restore(self, saved: TrainingProgress) -> None:
        """Restore the model and the callbacks. All ranks must call this."""
        restore_training(saved, self._snapshot, self._state, self._warn)

    def _stopped_early(self, epochs: int) -> bool:
        """Return whether EarlyStopping on any rank ended training. All ranks must call this."""
        stopped = np.array(stopped_early(self._state.callbacks, epochs))
        return bool(self._state.collectives.allreduce(stopped, "max", name="stopped early"))

    def _signal(self) -> int:
        """Return the number of the signal that this rank has received, or 0."""
        return self._signals.received

    def _others(self) -> Sequence[WorkerPosition]:
        """Return how far other ranks have read, if steps differ. Only the chief calls this."""
        return ()

    def _wait_for_others(self, *, stop: bool) -> None:
        """Wait until the other ranks have ended, and take the checkpoints that are due meanwhile.

        If ``stop`` is true, the other ranks are asked to end now.
        """

    def _warn(self, text: str) -> None:
        self._log(text, logging.WARNING)

    def _log(self, text: str, level: int = logging.INFO) -> None:
        if self._membership.is_chief:
            logger.log(level, text)


def _export_model(model: keras.Model, path: str) -> None:
    """Save the model to a ``.keras`` file. An existing file is replaced atomically."""
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
