"""All of a training at one moment, put together on the chief."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.model_parts import built_for
from hvdtrain.keras.saving.callback_states import callback_states
from hvdtrain.keras.saving.training_progress import TrainingProgress, history_so_far
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.saving.worker_position import WorkerPosition
from hvdtrain.tensorflow import random_seed

__all__ = ["take_snapshot"]


def take_snapshot(
    state: TrainingState,
    epochs: EpochIterator,
    ranks: Mapping[str, np.ndarray],
    others: Sequence[WorkerPosition],
    *,
    epoch: int,
    epoch_step: int,
    logs: Mapping[str, Any] | None,
    seed: int,
) -> Snapshot:
    """Copy what a checkpoint is to hold; the copies are overwritten the next time.

    Args:
        epochs: Where ``fit`` stands in its data.
        ranks: What each rank has of its own, from ``TrainingState.gather_own``.
        others: Where the ranks after the chief stand, if each goes its own way.
        epoch: The one in work, or the next.
        epoch_step: Steps of it that are done.
        logs: The logs of the epoch that has just ended, if one has.
        seed: The seed of the data's orders.
    """
    counted = {
        f"rank/{rank}/samples": np.array(other.samples) for rank, other in enumerate(others, 1)
    }
    ranks = {**ranks, **counted}
    kept, arrays = callback_states(state.callbacks)
    data, place = epochs.sharded, epochs.place(epoch_step=epoch_step)
    progress = TrainingProgress(
        step=epochs.step,
        epoch=epoch,
        place=place,
        unit=data.unit,
        seed=seed,
        tensorflow_seed=random_seed.current_seed(),
        presharded=data.presharded,
        samples=sum(int(ranks[f"rank/{rank}/samples"]) for rank in range(place.ranks)),
        callbacks=kept,
        history=history_so_far(state.model.history, epoch - 1, logs),
        others=others,
        begins=list(epochs.begins.values()),
        each=data.each,
        built=built_for(state.model),
    )
    model = {**state.shared(), **arrays}
    return Snapshot(step=epochs.step, state=progress.to_json(), model=model, ranks=ranks)
