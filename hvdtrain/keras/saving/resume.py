"""Goes on with a training where its newest checkpoint was taken; all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import CheckpointError, RanksLostError
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.learning_rate import follow_saved
from hvdtrain.keras.model_parts import build_as, optimizers_of
from hvdtrain.keras.saving.callback_states import kept_by_callbacks, restore_callbacks
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import set_initial_epoch
from hvdtrain.tensorflow import random_seed

__all__ = ["Resume", "broadcast_arrays", "find"]

logger = logging.getLogger(__package__)

_CHIEF_LOST = "The rank that reads the checkpoint was lost meanwhile. Start the job again."


def find(
    store: Store | None, state: TrainingState, collectives: Collectives
) -> tuple[TrainingProgress, Snapshot | None] | None:
    """Look for a checkpoint in the ``store``, which the chief alone has; collective.

    Returns:
        How far the training had come, and on the chief all that was saved; None where training
        begins anew.

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
                build_as(state.model, TrainingProgress.from_json(snapshot.state).built)
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
    build_as(state.model, progress.built)
    return progress, snapshot


class Resume:
    """One checkpoint on its way into a model.

    Args:
        snapshot: All that was saved, on the chief; elsewhere None.
    """

    def __init__(
        self, progress: TrainingProgress, snapshot: Snapshot | None, state: TrainingState
    ) -> None:
        self.progress = progress
        self._snapshot = snapshot
        self._state = state

    def move(self, epochs: EpochIterator) -> None:
        """Move on to where the checkpoint was taken.

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

    def on_train_begin(self) -> None:
        """Set the first epoch; between two epochs, restore everything."""
        set_initial_epoch(self._state.model, self.progress.epoch)
        if not self.progress.within_epoch:
            self.restore()

    def on_epoch_begin(self) -> None:
        """Within an epoch restore everything now, after all that Keras and callbacks begin with."""
        if self.progress.within_epoch:
            self.restore()
        self.finish()

    def finish(self) -> None:
        """Give ``fit`` back what it has to return; Keras forgets that when training begins.

        Call as the first epoch begins, or at the end where the training was complete.
        """
        self._snapshot = None
        report.resumed(self.progress.step)
        history, saved = self._state.model.history, self.progress.history
        history.history = {name: list(values) for name, values in saved["logs"].items()}
        history.epoch = list(saved["epoch"])

    def restore(self) -> None:
        """Give the model and the callbacks what they had; collective."""
        snapshot, state = self._snapshot, self._state
        ranks, collectives = self.progress.place.ranks, state.collectives
        state.restore_shared(None if snapshot is None else snapshot.model)
        for optimizer in optimizers_of(state.model):
            follow_saved(optimizer, ranks, collectives.size)
        kept = None if snapshot is None else kept_by_callbacks(snapshot.model)
        self.restore_callbacks(broadcast_arrays(kept, collectives))
        # Last: what came before draws random numbers here and there.
        state.restore_own(None if snapshot is None else snapshot.ranks, ranks)
        there = collectives.allreduce(np.array(snapshot is not None), "max", name="restored")
        if not there:
            raise RanksLostError(_CHIEF_LOST)

    def restore_callbacks(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Give the callbacks what they had, and tell what there is no callback for."""
        for lost in restore_callbacks(self._state.callbacks, self.progress.callbacks, arrays):
            self._say(
                f"the checkpoint holds the state of a callback {lost}, and fit was given none; "
                "training goes on without"
            )

    def _say(self, text: str) -> None:
        if self._state.collectives.rank == 0:
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
