"""Goes on with a training where its newest checkpoint was taken; all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import CheckpointError, RanksLostError
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.learning_rate import follow_saved
from hvdtrain.keras.model_optimizers import optimizers_of
from hvdtrain.keras.saving.callback_states import kept_by_callbacks, restore_callbacks
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.monitor import report
from hvdtrain.tensorflow import random_seed

__all__ = ["FoundCheckpoint", "Resume", "broadcast_arrays", "find"]

logger = logging.getLogger(__package__)

_CHIEF_LOST = "The rank that reads the checkpoint was lost meanwhile. Start the job again."


class FoundCheckpoint(NamedTuple):
    """A checkpoint to go on from.

    Attributes:
        progress: How far it had come.
        snapshot: On the chief, elsewhere None.
    """

    progress: TrainingProgress
    snapshot: Snapshot | None


def find(
    store: Store | None, state: TrainingState, collectives: Collectives
) -> FoundCheckpoint | None:
    """Look for a checkpoint; collective.

    Args:
        store: On the chief; the other ranks need not see the files.
        state: Of the model that is to be trained.
        collectives: The engine.

    Returns:
        None where training begins anew.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest is of another model. Raised on
            every rank.
    """
    snapshot = None
    answer: dict[str, Any] = {}
    if store is None:
        answer["error"] = _CHIEF_LOST  # heard only if the chief is lost meanwhile
    else:
        try:
            snapshot = store.newest()
            if snapshot is not None:
                state.build(TrainingProgress.from_json(snapshot.state).built)
                state.check(snapshot.model)
                answer["state"] = snapshot.state
        except CheckpointError as error:
            answer["error"] = str(error)
    answer = collectives.broadcast_object(answer, name="newest checkpoint")
    if "error" in answer:
        raise CheckpointError(answer["error"])
    if "state" not in answer:
        return None
    progress = TrainingProgress.from_json(answer["state"])
    state.build(progress.built)
    return FoundCheckpoint(progress, snapshot)


class Resume:
    """One checkpoint on its way into a model.

    Args:
        found: The checkpoint.
        state: Of the model.
        collectives: The engine.
    """

    def __init__(
        self, found: FoundCheckpoint, state: TrainingState, collectives: Collectives
    ) -> None:
        self.progress, self._snapshot = found
        self._state = state
        self._collectives = collectives
        self._restored = False

    def place(self, epochs: EpochIterator) -> None:
        """Set where the data begins.

        Args:
            epochs: Of the ``fit`` that begins.

        Raises:
            CheckpointError: The checkpoint was taken within an epoch over another kind of data.
        """
        progress, data = self.progress, epochs.sharded
        if progress.place.position is not None and progress.unit != data.unit:
            raise CheckpointError(
                f"The checkpoint was taken within a pass over {progress.unit}, and the data given "
                f"now is shared out by {data.unit}. Resume with the same kind of input, or begin "
                "anew in another directory."
            )
        seed = random_seed.current_seed()
        if progress.within_epoch and data.follows_global_seed and progress.tensorflow_seed != seed:
            self._say(
                f"the tf.data pipeline shuffles, and TensorFlow's global seed was "
                f"{progress.tensorflow_seed} when this training began and is {seed} now: the rest "
                "of this epoch has another order, so that some samples come twice and others not. "
                "To go on exactly, call keras.utils.set_random_seed(1) at the start of the program"
            )
        epochs.resume(progress.place, epoch=progress.epoch, step=progress.step)

    def on_train_begin(self, model: keras.Model, callbacks: Sequence[Any]) -> None:
        """Set the first epoch; between two epochs, restore everything."""
        model._initial_epoch = self.progress.epoch
        if not self.progress.within_epoch:
            self.restore(model, callbacks)

    def on_epoch_begin(self, model: keras.Model, callbacks: Sequence[Any]) -> None:
        """Within an epoch restore everything now, after all that Keras and callbacks begin with."""
        if self._restored:
            return
        if self.progress.within_epoch:
            self.restore(model, callbacks)
        self._finish(model)

    def on_train_end(self, model: keras.Model) -> None:
        """Where the training was complete there was no epoch to begin."""
        if not self._restored:
            self._finish(model)

    def _finish(self, model: keras.Model) -> None:
        """Give ``fit`` back what it has to return; Keras forgets that when training begins."""
        self._restored = True
        self._snapshot = None
        report.resumed(self.progress.step)
        history = self.progress.history
        model.history.history = {name: list(v) for name, v in history["logs"].items()}
        model.history.epoch = list(history["epoch"])

    def restore(self, model: keras.Model, callbacks: Sequence[Any]) -> None:
        """Give the model and the callbacks what they had; collective."""
        snapshot, progress = self._snapshot, self.progress
        self._state.restore_shared(None if snapshot is None else snapshot.model)
        ranks = progress.place.ranks
        for optimizer in optimizers_of(model):
            follow_saved(optimizer, ranks, self._collectives.size)
        kept = None if snapshot is None else kept_by_callbacks(snapshot.model)
        self.restore_callbacks(callbacks, broadcast_arrays(kept, self._collectives))
        # Last: what came before draws random numbers here and there.
        self._state.restore_own(None if snapshot is None else snapshot.ranks, ranks)
        there = self._collectives.allreduce(np.array(snapshot is not None), "max", name="restored")
        if not there:
            raise RanksLostError(_CHIEF_LOST)

    def restore_callbacks(self, callbacks: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Give the callbacks what they had, and tell what there is no callback for."""
        for lost in restore_callbacks(callbacks, self.progress.callbacks, arrays):
            self._say(
                f"the checkpoint holds the state of a callback {lost}, and fit was given none; "
                "training goes on without"
            )

    def _say(self, text: str) -> None:
        if self._collectives.rank == 0:
            logger.warning(text)


def broadcast_arrays(
    arrays: Mapping[str, np.ndarray] | None, collectives: Collectives
) -> dict[str, np.ndarray]:
    """Give all ranks the chief's arrays; the others pass None and know nothing of them."""
    own = arrays or {}
    kinds = [(key, array.dtype.name, array.shape) for key, array in own.items()]
    kinds = collectives.broadcast_object(kinds, name="arrays of a checkpoint")
    return {
        key: collectives.broadcast(
            own.get(key, np.empty(shape, np.dtype(dtype))), name=f"checkpoint's {key}"
        )
        for key, dtype, shape in kinds
    }
