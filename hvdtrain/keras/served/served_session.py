"""From the callbacks of a ``fit`` with servers to its checkpoints, as ``hvdtrain.keras.saving``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.interface import Collectives
from hvdtrain.collectives.single import single_collectives
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession, open_store
from hvdtrain.keras.saving.resume import broadcast_arrays, find
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.served.independent_worker import IndependentWorker
from hvdtrain.keras.served.server_optimizer_state import ServerOptimizerState
from hvdtrain.keras.served.worker_checkpoints import ServedOthers, ServedResume
from hvdtrain.keras.served.worker_link import WorkerLink

__all__ = ["begin_served_session", "find_for_all"]


def find_for_all(
    store: Store | None, state: TrainingState, collectives: Collectives
) -> tuple[TrainingProgress, Snapshot] | None:
    """Look for a checkpoint, and give all of it to all ranks; collective.

    Args:
        store: On the chief, elsewhere None.
        state: Of the model that is to be trained.
        collectives: Of all ranks.

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


def begin_served_session(
    asked: Checkpoint,
    model: keras.Model,
    collectives: Collectives,
    callbacks: Sequence[Any],
    exchange: WorkerLink,
    steps: ModelSteps,
    *,
    place: IndependentWorker,
    servers: ServerOptimizerState,
    in_update: Callable[[int], int],
    presharded: bool,
) -> tuple[CheckpointSession, ServedResume | None]:
    """What takes checkpoints on a worker; collective, with ``find_for_all`` on servers.

    Args:
        asked: The user's callback.
        model: Compiled, built and distributed.
        collectives: Of all ranks.
        callbacks: Of this worker.
        exchange: With the servers.
        steps: Of the model.
        place: Of this worker among all.
        servers: What their optimizers know.
        in_update: How many gradients one update is made of, for a number of workers.
        presharded: Whether each worker has data of its own.

    Returns:
        It, and what training goes on from, or None.

    Raises:
        CheckpointError: No checkpoint can be used; on all ranks.
    """
    alone = single_collectives()
    state = TrainingState(model, alone, steps.samples, callbacks)
    store = open_store(asked.options)
    found = find_for_all(store if place.rank == 0 else None, state, collectives)
    resume = None
    if found is not None:
        resume = ServedResume(
            *found,
            state,
            rank=place.rank,
            size=place.size,
            in_update=in_update,
            pull=exchange.pull,
        )
    peers = ServedOthers(
        model,
        exchange,
        steps,
        state,
        servers,
        rank=place.rank,
        size=place.size,
        resume=resume,
    )
    session = CheckpointSession(
        asked.options,
        state,
        place,
        store=store,
        resume=resume,
        peers=peers,
        presharded=presharded,
    )
    return session, resume
