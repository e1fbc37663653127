"""Copies a training and has it written; the chief does, and all ranks tell it what is theirs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.checkpoint.background_writer import BackgroundWriter
from hvdtrain.errors import CheckpointError
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_parts import built_for
from hvdtrain.keras.saving.callback_states import callback_states
from hvdtrain.keras.saving.checkpoint_options import CheckpointOptions
from hvdtrain.keras.saving.checkpoint_schedule import CheckpointSchedule
from hvdtrain.keras.saving.training_progress import TrainingProgress, history_so_far
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.saving.worker_position import WorkerPosition
from hvdtrain.monitor import report
from hvdtrain.tensorflow import random_seed

__all__ = ["CheckpointSaver", "open_store"]

logger = logging.getLogger(__package__)


def open_store(options: CheckpointOptions) -> Store:
    """The directory that a user wants checkpoints in."""
    return Store(options.directory, keep=options.keep, notice=logger.warning)


class CheckpointSaver:
    """Writes the checkpoints of a ``CheckpointSession``.

    Args:
        state: The state of what is trained; its collectives are between those who decide together.
        store: Where checkpoints go; used on the chief alone.
        schedule: Learns when a checkpoint has been taken.
        epochs: Where ``fit`` stands in its data.
        seed: The seed of the data's orders.
        others: Returns, on the chief, where the other ranks stand if they aren't where it is; gives
            the model what is to be saved, if it hasn't got that.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        state: TrainingState,
        membership: Membership,
        store: Store,
        schedule: CheckpointSchedule,
        epochs: EpochIterator,
        *,
        seed: int,
        others: Callable[[], Sequence[WorkerPosition]],
    ) -> None:
        self._export_path = options.export
        self._state = state
        self._membership = membership
        self._schedule = schedule
        self._epochs = epochs
        self._seed = seed
        self._others = others
        self.writer = BackgroundWriter(store, report.saved)
        self.paused_s: list[float] = []
        """For how long each checkpoint kept training from going on; on the chief."""
        self._complained_after: int | None = None  # so many checkpoints that were written

    def take(
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
            logs: The logs of the epoch that has just ended, if one has.
            earlier: This rank's own values at that step, if they have changed since.
        """
        start_s = time.monotonic()
        with report.during("checkpoint"):
            ranks = self._state.gather_own(earlier)
            while self._membership.renew():
                ranks = self._state.gather_own(earlier)
            if self._membership.is_chief:
                # What it writes is copied over by what comes now.
                self.writer.wait()
                self.writer.start(self._snapshot(ranks, epoch, epoch_step, logs))
        if self._membership.is_chief:
            now_s = time.monotonic()
            self.paused_s.append(now_s - start_s)
            self._schedule.note_taken(now_s)

    def _snapshot(
        self,
        ranks: Mapping[str, np.ndarray],
        epoch: int,
        epoch_step: int,
        logs: Mapping[str, Any] | None,
    ) -> Snapshot:
        """All of the training, on the chief; ``ranks`` is what each rank has of its own."""
        others = self._others()
        counted = {
            f"rank/{rank}/samples": np.array(other.samples) for rank, other in enumerate(others, 1)
        }
        ranks = {**ranks, **counted}
        kept, arrays = callback_states(self._state.callbacks)
        step, data = self._epochs.step, self._epochs.sharded
        progress = TrainingProgress(
            step=step,
            epoch=epoch,
            place=self._epochs.place(epoch_step=epoch_step),
            unit=data.unit,
            seed=self._seed,
            tensorflow_seed=random_seed.current_seed(),
            presharded=data.presharded,
            samples=sum(int(ranks[f"rank/{r}/samples"]) for r in range(self._membership.size)),
            callbacks=kept,
            history=history_so_far(self._state.model.history, epoch - 1, logs),
            others=others,
            begins=list(self._epochs.begins.values()),
            each=data.each,
            built=built_for(self._state.model),
        )
        model = {**self._state.shared(), **arrays}
        return Snapshot(step=step, state=progress.to_json(), model=model, ranks=ranks)

    def save_for_good(
        self, *, epoch: int, epoch_step: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Take a checkpoint and return when it is on disk, whichever rank it is that writes."""
        while True:
            self.take(epoch=epoch, epoch_step=epoch_step, logs=logs)
            self.writer.wait()
            self._state.collectives.barrier(name="checkpoint is saved")
            if not self._membership.lose_chief():
                return

    def export(self) -> None:
        """Save the model in Keras' own format, on the chief and if so asked.

        The file at the path is always a whole one: the former or this.
        """
        path = self._export_path
        if not self._membership.is_chief or path is None:
            return
        target = Path(path)
        temporary = target.with_name(f".{target.stem}-{os.getpid()}.keras")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._state.model.save(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self.complain(f"The model can't be saved as {path}: {error.strerror or error}.")

    def complain(self, error: CheckpointError | str) -> None:
        """Warn once until a checkpoint could be saved again: a full disk stays full for long."""
        written = len(self.writer.written_s)
        if self._complained_after != written:
            self._complained_after = written
            logger.warning("no checkpoint could be saved, training goes on: %s", error)
