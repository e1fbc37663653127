"""Checkpoints of a ``fit`` with parameter servers, on their way into the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.interface import Collectives
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.leftovers import leftovers
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.learning_rate import follow_saved
from hvdtrain.keras.optimizer_patch import accumulators, plain_optimizers
from hvdtrain.keras.saving.callback_states import kept_by_callbacks
from hvdtrain.keras.saving.resume import Resume, broadcast_arrays, find
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.saving.worker_position import WorkerPosition

__all__ = ["WorkerResume", "find_for_all"]


def find_for_all(
    store: Store | None, state: TrainingState, collectives: Collectives
) -> tuple[TrainingProgress, Snapshot] | None:
    """Look for a checkpoint, and give all of it to all ranks; collective.

    Args:
        store: On the chief, elsewhere None.
        state: What belongs to the training of the model.
        collectives: Between all ranks.

    Raises:
        CheckpointError: None can be used; on all ranks.
    """
    found = find(store, state, collectives)
    if found is None:
        return None
    progress, snapshot = found
    model = broadcast_arrays(None if snapshot is None else snapshot.model, collectives)
    ranks = broadcast_arrays(None if snapshot is None else snapshot.ranks, collectives)
    return progress, Snapshot(step=progress.step, state={}, model=model, ranks=ranks)


class WorkerResume(Resume):
    """A checkpoint on its way into one worker, which has all of it.

    Args:
        progress: How far the training had come.
        snapshot: The weights and states that were saved.
        state: What belongs to the training, beside the model.
        rank: The number of this worker.
        size: How many workers there are.
        in_update: How many gradients one update is made of, for a number of workers.
        pull: Takes the newest weights from the servers.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        snapshot: Snapshot,
        state: TrainingState,
        *,
        rank: int,
        size: int,
        in_update: Callable[[int], int],
        pull: Callable[[], None],
    ) -> None:
        super().__init__(progress, snapshot, state)
        self._saved = snapshot
        self._rank = rank
        self._size = size
        self._in_update = in_update
        self._pull = pull
        self._went_back = False
        self.starts: Sequence[WorkerPosition] = ()
        """The position at which each worker begins; known once the data are."""

    def move(self, epochs: EpochIterator) -> None:
        progress = self.progress
        begins = {position.epoch: position for position in progress.begins}
        self.starts, epochs.begins = _begin_at(progress, begins, epochs, self._size)
        mine = self.starts[self._rank]
        self._went_back = mine.epoch < progress.epoch and self._rank == 0
        self.progress = dataclasses.replace(
            progress,
            epoch=mine.epoch,
            place=mine.place,
            history=_history_before(progress.history, mine.epoch),
        )
        super().move(epochs)

    def restore_shared(self) -> None:
        """Give this worker's model the weights and the optimizer's state."""
        self._state.restore_shared(self._saved.model)
        before, now = (self._in_update(n) for n in (self.progress.place.ranks, self._size))
        follow_saved(self._state.model.optimizer, before, now)

    def restore(self) -> None:
        model = self._state.model
        self.restore_shared()
        self.restore_callbacks(kept_by_callbacks(self._saved.model))
        ranks = self.progress.place.ranks
        self._state.restore_part(self._saved.ranks, ranks, rank=self._rank, size=self._size)
        if self._rank:
            _forget_accumulated(model.optimizer)
        if self._went_back:
            model.reset_metrics()
        # Peers may have trained on meanwhile.
        self._pull()

    def _say(self, text: str) -> None:
        if self._rank == 0:
            super()._say(text)


def _begin_at(
    progress: TrainingProgress, begins: Mapping[int, Position], epochs: EpochIterator, size: int
) -> tuple[Sequence[WorkerPosition], dict[int, Position]]:
    """Where ``size`` workers begin, and where later passes do."""
    data = epochs.sharded
    place = progress.place
    before = [WorkerPosition(progress.epoch, place, 0), *progress.others]
    if not progress.others:
        return before * size, dict(begins)
    as_before = len(before) == size and progress.each == data.each
    if as_before or data.presharded:
        return before if len(before) == size else before[:1] * size, dict(begins)
    positions = [
        worker.place.position or begins.get(worker.epoch, Position(epoch=worker.epoch))
        for worker in before
    ]
    first, *later = leftovers(positions, each=progress.each, units=data.units, begins=begins)
    slowest = min(before, key=lambda worker: (worker.epoch, worker.place.epoch_step))
    most = epochs.steps_per_epoch or max(worker.place.epoch_step for worker in before)
    done = sum(s.place.epoch_step if s.epoch == slowest.epoch else most for s in before)
    begun = first.start > 0 and done > 0
    joint = dataclasses.replace(
        slowest.place,
        position=first if first.start else None,
        epoch_step=max(1, done // len(before)) if begun else 0,
    )
    starts = [WorkerPosition(slowest.epoch, joint, 0)] * size
    return starts, {**begins, **{position.epoch: position for position in later}}


def _history_before(history: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    kept = [n for n, number in enumerate(history["epoch"]) if number < epoch]
    return {
        "epoch": [history["epoch"][n] for n in kept],
        "logs": {
            name: [values[n] for n in kept if n < len(values)]
            for name, values in history["logs"].items()
        },
    }


def _forget_accumulated(optimizer: Any) -> None:
    """Begin between two updates: the others' last gradients are computed again."""
    for leaf in plain_optimizers(optimizer):
        for variable in accumulators(leaf):
            variable.assign(np.zeros(variable.shape))
        waiting = int(leaf._iterations.numpy()) % (leaf.gradient_accumulation_steps or 1)
        leaf._iterations.assign_sub(waiting)
