"""Takes the checkpoints of one ``fit``: decides when, copies, and hands over to the writer."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint import Snapshot
from hvdtrain.checkpoint.background_writer import BackgroundWriter
from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import CheckpointError, Preempted
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.membership import Change, Membership
from hvdtrain.keras.saving.callback_states import callback_states
from hvdtrain.keras.saving.checkpoint_options import CheckpointOptions
from hvdtrain.keras.saving.model_export import export_model
from hvdtrain.keras.saving.peers import Peers
from hvdtrain.keras.saving.preemption_signals import PreemptionSignals
from hvdtrain.keras.saving.resume import Resume
from hvdtrain.keras.saving.signal_poll import SignalPoll
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.monitor import report
from hvdtrain.tensorflow import random_seed

__all__ = ["CheckpointLoop"]

logger = logging.getLogger(__package__)

# Where fit ended by an error: the job is about to be ended, too.
CLOSE_TIMEOUT_S = 4.0


class CheckpointLoop:
    """Does the work of a ``Checkpoint``; every rank has one.

    Args:
        options: What the user asked for.
        model: Compiled, built and distributed.
        collectives: The engine.
        membership: Who takes part; followed, as another rank may become the chief.
        callbacks: All of the user's, in their order.
        state: Of the model.
        others: The ranks beside this one.
        epochs: Where ``fit`` stands in its data.
        writer: Used on the chief alone.
        resume: What training goes on from, or None.
        seed: Of all orders of the data.
        presharded: Whether each rank has data of its own.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        *,
        model: keras.Model,
        collectives: Collectives,
        membership: Membership,
        callbacks: Sequence[Any],
        state: TrainingState,
        others: Peers,
        epochs: EpochIterator,
        writer: BackgroundWriter,
        resume: Resume | None,
        seed: int,
        presharded: bool,
    ) -> None:
        self._options = options
        self._model = model
        self._collectives = collectives
        self._membership = membership
        self._callbacks = callbacks
        self._state = state
        self._others = others
        self._epochs = epochs
        self._writer = writer
        self._resume = resume
        self._seed = seed
        self._presharded = presharded
        self._schedule = options.schedule()
        self._signals = PreemptionSignals()
        self._epoch = 0
        self._epoch_step = 0  # steps of it that are done
        self._step_before = epochs.step
        self._validation: SignalPoll | None = None
        # Of the chief: when the ranks last met, and when a checkpoint was last taken.
        self._met = (epochs.step, time.monotonic())
        self._taken_s = time.monotonic()
        self.paused_s: list[float] = []
        """For how long each checkpoint kept training from going on."""
        self._overdue = False
        self._complained_after: int | None = None  # so many checkpoints that were written
        self._preempted = False

    def open(self) -> None:
        """Begin: signals no longer end the process, but the training after a step."""
        self._others.open(self._epochs, self._state.samples)
        self._signals.catch()

    def close(self) -> None:
        """End, however ``fit`` ended."""
        self._writer.wait(CLOSE_TIMEOUT_S)
        self._signals.release(handled=self._preempted)

    def take_over(self, change: Change) -> None:
        """Write from now on, if the chief is lost and this rank comes after it."""
        if self._chief and change.of_chief:
            # Whether the newest one has come to the disk is not known here.
            self._overdue = True
            self._met = (self._epochs.step, time.monotonic())
            self._taken_s = time.monotonic()
            self._say(f"checkpoints are written to {self._options.directory} by another rank now")

    def on_train_begin(self) -> None:
        """Resume if there is something to resume from."""
        if self._resume is None:
            return
        self._resume.on_train_begin(self._model, self._callbacks)
        saved = self._resume.progress
        place = saved.place
        ranks = f"; {place.ranks} ranks saved it" if place.ranks != self._size else ""
        self._say(
            f"training goes on from the checkpoint of step {saved.step} in "
            f"{self._options.directory} (epoch {saved.epoch + 1}, {place.epoch_step} steps of it "
            f"done{ranks})"
        )

    def on_epoch_begin(self, epoch: int) -> None:
        """Note the epoch; the first time, finish resuming."""
        self._epoch, self._epoch_step = epoch, 0
        self._validation = None
        if self._resume is not None:
            self._resume.on_epoch_begin(self._model, self._callbacks)
            self._epoch_step = self._resume.progress.place.epoch_step
            self._resume = None
        self._others.begin_epoch(epoch)

    def on_batch_end(self, batch: int) -> None:
        """Take a checkpoint if one is due, or if a signal has come to some rank."""
        self._epoch_step = batch + 1
        if not self._others.ready:
            return
        step, before = self._epochs.step, self._step_before
        self._step_before = step
        if self._membership.too_few is not None:
            self._save_for_good(epoch=self._epoch, epoch_step=batch + 1)
            return
        if not self._schedule.meets(step, before):
            return
        number, take = self._meet(step, due=self._schedule.is_due(step, before))
        if number or take:
            self._take(epoch=self._epoch, epoch_step=batch + 1)
        if number:
            self._end(number)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any], *, last: bool) -> None:
        """Take a checkpoint at the end of the training, and of other epochs if so asked.

        At the very end Keras may overwrite weights by their averages: that comes after this.
        """
        stops = bool(self._model.stop_training)
        last = last or stops or self._membership.too_few is not None
        if last:
            self._wait_for_others(epoch=epoch + 1, logs=logs, stop=stops)
        if not last and not self._schedule.every_epoch:
            return
        if last and self._membership.elastic:
            self._save_for_good(epoch=epoch + 1, epoch_step=0, logs=logs)
        else:
            self._take(epoch=epoch + 1, epoch_step=0, logs=logs)
        self._export()
        if last:
            number, _ = self._meet(self._epochs.step, due=False)
            if number:
                self._end(number)

    def _wait_for_others(
        self, *, epoch: int, logs: Mapping[str, Any] | None = None, stop: bool = False
    ) -> None:
        """Go on taking checkpoints after this rank's last step, as long as others train."""
        for _ in self._others.until_all_have_ended(stop=stop):
            number, take = self._meet(self._epochs.step, due=False)
            if number or take:
                self._take(epoch=epoch, epoch_step=0, logs=logs)
            if number:
                self._end(number)

    def on_test_begin(self) -> None:
        """Keep what this rank has of its own, of which a validation overwrites the metrics."""
        swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in self._callbacks)
        # While averages take the place of the weights there is nothing that could be saved.
        if self._validation is None and not swaps:
            self._validation = SignalPoll(self._state.copy_own())

    def on_test_batch_end(self) -> None:
        """If a signal has come to some rank, take a checkpoint of the last training step, and end.

        The validation begins anew when training goes on.
        """
        validation = self._validation
        if validation is None:
            return
        received = self._others.received(self._signals.received)
        number = validation.look(received, self._collectives)
        if number:
            self._take(epoch=self._epoch, epoch_step=self._epoch_step, earlier=validation.own)
            self._end(number)

    def finish(self) -> None:
        """Call before the others end: where this rank had no epoch to run, some may have."""
        if self._resume is None:
            return
        epoch = self._resume.progress.epoch
        self._resume.on_train_end(self._model)
        self._resume = None
        if self._chief and self._others.were_behind(epoch):
            self._wait_for_others(epoch=epoch)
            self._take(epoch=epoch, epoch_step=0)
            self._export()

    def on_train_end(self) -> None:
        """Return when the last checkpoint is on disk, or can't be."""
        if self._resume is not None:
            self._resume.on_train_end(self._model)
        self._writer.wait()
        self._meet(self._epochs.step, due=False)

    @property
    def written_s(self) -> Sequence[float]:
        """How long each write took; on the chief."""
        return self._writer.written_s

    @property
    def _chief(self) -> bool:
        return self._membership.rank == 0

    @property
    def _size(self) -> int:
        return self._membership.size

    def _meet(self, step: int, *, due: bool) -> tuple[int, bool]:
        """Exchange a word with the other ranks; collective.

        Args:
            step: The one just done.
            due: Whether a checkpoint is due by steps.

        Returns:
            A signal that came to some rank, or 0; and whether to take a checkpoint now.

        Raises:
            CheckpointError: The chief could not write, and was asked to raise then.
        """
        word = np.zeros(4, np.int64)
        word[0] = self._others.received(self._signals.received)
        error = None
        if self._chief:
            error = self._writer.take_error()
            now = time.monotonic()
            late = self._schedule.is_late(now - self._taken_s)
            self._overdue = self._overdue or due or late
            word[1] = self._overdue and not self._writer.busy
            met_step, met_s = self._met
            step_s = (now - met_s) / max(1, step - met_step)
            word[2] = self._schedule.steps_ahead(step_s, now - self._taken_s)
            word[3] = error is not None and self._options.on_error == "raise"
            self._met = (step, now)
        number, take, ahead, failed = self._collectives.allreduce(
            word, "max", name="whether to save"
        )
        self._schedule.look_again(step + int(ahead))
        if failed:
            text = str(error or "The chief could not save a checkpoint.")
            reason = self._collectives.broadcast_object(
                text, name="checkpoint's error", replicated=True
            )
            raise CheckpointError(reason)
        if error is not None:
            self._complain(error)
        return int(number), bool(take)

    def _take(
        self,
        *,
        epoch: int,
        epoch_step: int,
        logs: Mapping[str, Any] | None = None,
        earlier: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Copy everything and hand it to the writer; collective.

        Args:
            epoch: The one in work, or the next.
            epoch_step: Steps of it that are done.
            logs: Of the epoch that has just ended, if one has.
            earlier: What this rank had of its own then, if that is not now.
        """
        start = time.monotonic()
        with report.during("checkpoint"):
            ranks = self._state.gather_own(earlier)
            while self._membership.renew():
                ranks = self._state.gather_own(earlier)
            self._write(ranks, epoch=epoch, epoch_step=epoch_step, logs=logs)
        if self._chief:
            self._taken_s = time.monotonic()
            self.paused_s.append(self._taken_s - start)
            self._overdue = False

    def _write(
        self,
        ranks: Mapping[str, np.ndarray],
        *,
        epoch: int,
        epoch_step: int,
        logs: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the rest and hand all of it to the writer; on the chief."""
        if not self._chief:
            return
        # Its arrays are copied over by the next ones.
        self._writer.wait()
        others = self._others.collect()
        counted = {
            f"rank/{rank}/samples": np.array(stand.samples) for rank, stand in enumerate(others, 1)
        }
        ranks = {**ranks, **counted}
        kept, arrays = callback_states(self._callbacks)
        progress = TrainingProgress(
            step=self._epochs.step,
            epoch=epoch,
            place=self._epochs.place(epoch_step=epoch_step),
            unit=self._epochs.sharded.unit,
            seed=self._seed,
            tensorflow_seed=random_seed.current_seed(),
            presharded=self._presharded,
            samples=sum(int(ranks[f"rank/{rank}/samples"]) for rank in range(self._size)),
            callbacks=kept,
            history=self._history(epoch, logs),
            others=others,
            begins=list(self._epochs.begins.values()),
            each=self._epochs.sharded.each,
            built=self._state.built(),
        )
        model = {**self._state.shared(), **arrays}
        self._writer.start(
            Snapshot(step=self._epochs.step, state=progress.to_json(), model=model, ranks=ranks)
        )

    def _save_for_good(
        self, *, epoch: int, epoch_step: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """As ``_take``, and return when it is on disk, whichever rank it is that writes."""
        while True:
            self._take(epoch=epoch, epoch_step=epoch_step, logs=logs)
            self._writer.wait()
            self._collectives.barrier(name="checkpoint is saved")
            if not self._membership.lose_chief():
                return

    def _history(self, epoch: int, logs: Mapping[str, Any] | None) -> dict[str, Any]:
        """What ``fit`` will return for the epochs so far; Keras notes the last one after this."""
        history = self._model.history
        epochs, values = list(history.epoch), {k: list(v) for k, v in history.history.items()}
        if logs is not None:
            epochs.append(epoch - 1)
            for name, value in logs.items():
                values.setdefault(name, []).append(value)
        return {
            "epoch": [int(number) for number in epochs],
            "logs": {
                name: [float(value) for value in entries if np.ndim(value) == 0]
                for name, entries in values.items()
            },
        }

    def _export(self) -> None:
        """Save the model in Keras' own format, on the chief and if so asked."""
        if not self._chief or self._options.export is None:
            return
        try:
            export_model(self._model, self._options.export)
        except CheckpointError as error:
            self._complain(error)

    def _end(self, number: int) -> None:
        """Leave the program after a signal, once the checkpoint is on disk; collective."""
        name = signal.Signals(number).name
        if self._chief:
            self._writer.wait()
            error = self._writer.take_error()
            if error is None:
                self._say(
                    f"{name} came; the checkpoint of step {self._epochs.step} is in "
                    f"{self._options.directory}. Start the program again to go on"
                )
            else:
                self._say(
                    f"{name} came, and no checkpoint could be saved: {error}", logging.WARNING
                )
        self._collectives.barrier(name="checkpoint is saved")
        self._preempted = True
        raise Preempted(number)

    def _complain(self, error: CheckpointError) -> None:
        """Once until a checkpoint could be saved again: a full disk stays full for long."""
        written = len(self._writer.written_s)
        if self._complained_after != written:
            self._complained_after = written
            self._say(f"no checkpoint could be saved, training goes on: {error}", logging.WARNING)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        if self._chief:
            logger.log(level, text)
