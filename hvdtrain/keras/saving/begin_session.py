"""Finds what a ``fit`` goes on from, and sets up its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdtrain.checkpoint import Store
from hvdtrain.collectives.interface import Collectives
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.saving.checkpoint_options import CheckpointOptions
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.saving.resume import find
from hvdtrain.keras.saving.training_state import TrainingState

__all__ = ["begin_session", "open_store"]

logger = logging.getLogger(__package__)


def begin_session(
    options: CheckpointOptions,
    model: keras.Model,
    collectives: Collectives,
    membership: Membership,
    callbacks: Sequence[Any],
    samples: keras.Variable,
    *,
    averaging: WeightAveraging | None,
    feedback: ErrorFeedback | None,
    join: Callable[[], None],
) -> CheckpointSession:
    """The checkpoints of a ``fit`` in which all ranks make each step together; collective.

    With ``averaging`` each rank has weights of its own in between, and its optimizer; ``join`` lets
    all have the same weights. ``feedback`` keeps what is not sent of gradients.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest is of another model.
    """
    state = TrainingState(
        model,
        collectives,
        samples,
        callbacks,
        own_optimizers=averaging is not None,
        outer=() if averaging is None else averaging.velocities,
        feedback=feedback,
    )
    membership.renew()
    # Another rank than the chief uses its own only if it becomes the chief.
    store = open_store(options)
    found = find(store if membership.rank == 0 else None, state, collectives)
    return CheckpointSession(options, state, membership, store, found, averaging, join)


def open_store(options: CheckpointOptions) -> Store:
    """The directory that a user wants checkpoints in."""
    return Store(options.directory, keep=options.keep, notice=logger.warning)
