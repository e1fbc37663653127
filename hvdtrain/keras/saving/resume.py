"""Resuming a training from its newest checkpoint, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import CheckpointError, RanksLostError
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.learning_rate import rescale_restored_rate
from hvdtrain.keras.model_parts import build_optimizers, optimizers_of
from hvdtrain.keras.saving.callback_states import kept_by_callbacks, restore_callbacks
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState, unsent_of
from hvdtrain.tensorflow import random_seed

__all__ = ["broadcast_arrays", "find", "move", "restore", "restore_kept"]

_CHIEF_LOST = "The rank that reads the checkpoint was lost meanwhile. Start the job again."


def find(
    store: Store | None, state: TrainingState, collectives: Engine
) -> tuple[TrainingProgress, Snapshot | None] | None:
    """Look for a checkpoint in the ``store``, which the chief alone has; collective.

    Returns:
        The progress and, on the chief, the whole checkpoint; None if there is none.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest is of another model. Raised on
            every rank.
    """
    snapshot = None
    answer: dict[str, Any] = {}
    if store is None:
        answer["error"] = _CHIEF_LOST  # received only if the chief is lost
    else:
        try:
            snapshot = store.newest()
            if snapshot is not None:
                build_optimizers(state.model, TrainingProgress.from_json(snapshot.state).built)
                state.check(snapshot.model)
                answer.update(state=snapshot.state, unsent=unsent_of(snapshot.ranks))
        except CheckpointError as error:
            answer["error"] = str(error)
    with collectives.without_timeout():  # the chief reads it from a disk that may be slow
        answer = collectives.broadcast_object(answer, name="newest checkpoint")
    if "error" in answer:
        raise CheckpointError(answer["error"])
    if "state" not in answer:
        return None
    progress = TrainingProgress.from_json(answer["state"])
    build_optimizers(state.model, progress.built)
    state.allocate_residuals(answer["unsent"])
    return progress, snapshot


def move(epochs: EpochIterator, progress: TrainingProgress, warn: Callable[[str], None]) -> None:
    """Move the data to where the checkpoint was taken.

    Raises:
        CheckpointError: The checkpoint was taken within an epoch over another kind of data.
    """
    data = epochs.sharded
    if progress.place.position is not None and progress.unit != data.unit:
        raise CheckpointError(
            f"The checkpoint was taken within a pass over {progress.unit}, and the data given "
            f"now is shared out by {data.unit}. Resume with the same kind of input, or start "
            "over in another directory."
        )
    seed = random_seed.current_seed()
    if progress.within_epoch and data.follows_global_seed and progress.tensorflow_seed != seed:
        warn(
            f"the tf.data pipeline shuffles, and TensorFlow's global seed was "
            f"{progress.tensorflow_seed} when this training began and is {seed} now: the rest "
            "of this epoch has another order, so that some samples come twice and others not. "
            "To go on exactly, call keras.utils.set_random_seed(1) at the start of the program"
        )
    epochs.resume(progress.place, epoch=progress.epoch, step=progress.step)


def restore(
    progress: TrainingProgress,
    snapshot: Snapshot | None,
    state: TrainingState,
    warn: Callable[[str], None],
) -> None:
    """Restore the model and the callbacks; collective.

    Args:
        snapshot: The checkpoint on the chief; None elsewhere.
    """
    ranks, collectives = progress.place.ranks, state.collectives
    state.restore_shared(None if snapshot is None else snapshot.model)
    for optimizer in optimizers_of(state.model):
        rescale_restored_rate(optimizer, ranks, collectives.size)
    kept = None if snapshot is None else kept_by_callbacks(snapshot.model)
    restore_kept(progress, broadcast_arrays(kept, collectives), state, warn)
    if snapshot is not None and not state.keeps_unsent and unsent_of(snapshot.ranks):
        warn(
            "the checkpoint holds parts of gradients that had not been sent yet, and now all of a "
            "gradient is sent: they are left out. Give the --compression of before to use them"
        )
    # Last: the calls above may draw random numbers.
    state.restore_own(None if snapshot is None else snapshot.ranks, ranks)
    there = collectives.allreduce(np.array(snapshot is not None), "max", name="restored")
    if not there:
        raise RanksLostError(_CHIEF_LOST)


def restore_kept(
    progress: TrainingProgress,
    arrays: Mapping[str, np.ndarray],
    state: TrainingState,
    warn: Callable[[str], None],
) -> None:
    """Restore the callbacks, and warn of saved ones that are missing now."""
    for lost in restore_callbacks(state.callbacks, progress.callbacks, arrays):
        warn(
            f"the checkpoint holds the state of a callback {lost}, and fit has no such callback; "
            "its state is ignored"
        )


def broadcast_arrays(
    arrays: Mapping[str, np.ndarray] | None, collectives: Engine
) -> dict[str, np.ndarray]:
    """Return the chief's arrays on all ranks; the others pass None."""
    own = arrays or {}
    kinds = [(key, array.dtype.name, array.shape) for key, array in own.items()]
    kinds = collectives.broadcast_object(kinds, name="arrays of a checkpoint")
    return {
        key: collectives.broadcast(
            own.get(key, np.empty(shape, np.dtype(dtype))), name=f"checkpoint's {key}"
        )
        for key, dtype, shape in kinds
    }
