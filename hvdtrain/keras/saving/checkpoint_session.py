"""From the callbacks of a ``fit`` to its checkpoints: finds, resumes, keeps, and closes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.checkpoint import Store
from hvdtrain.checkpoint.background_writer import BackgroundWriter
from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import ModelError
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.keras.saving.checkpoint_loop import CheckpointLoop
from hvdtrain.keras.saving.peers import Peers
from hvdtrain.keras.saving.resume import Resume, find
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.monitor import report

__all__ = ["CheckpointSession", "asked_for", "begin_session", "store_of"]

logger = logging.getLogger(__package__)


def asked_for(callbacks: Sequence[Any]) -> Checkpoint | None:
    """The ``Checkpoint`` among the callbacks.

    Raises:
        ModelError: There are several.
    """
    found = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(found) > 1:
        folders = ", ".join(checkpoint.options.directory for checkpoint in found)
        raise ModelError(
            f"fit received {len(found)} hvdtrain.Checkpoint callbacks ({folders}); expected one. "
            "Give one of them every_steps, every_s and keep as you need them."
        )
    return found[0] if found else None


def begin_session(
    asked: Checkpoint,
    model: keras.Model,
    collectives: Collectives,
    membership: Membership,
    callbacks: Sequence[Any],
    samples: keras.Variable,
    *,
    presharded: bool,
) -> CheckpointSession:
    """The checkpoints of a ``fit`` in which all ranks make each step together; collective.

    Args:
        asked: The user's callback.
        model: Compiled, built and distributed.
        collectives: The engine.
        membership: Who takes part.
        callbacks: All of the user's, in their order.
        samples: Counts what this rank has trained on.
        presharded: Whether each rank has data of its own.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest is of another model.
    """
    state = TrainingState(model, collectives, samples)
    membership.renew()
    # Another rank than the chief uses its own only if it becomes the chief.
    store = store_of(asked)
    found = find(store if membership.rank == 0 else None, state, collectives)
    return CheckpointSession(
        asked,
        model,
        collectives,
        membership,
        callbacks,
        state=state,
        store=store,
        resume=None if found is None else Resume(found, state, collectives),
        others=Peers(),
        presharded=presharded,
    )


def store_of(asked: Checkpoint) -> Store:
    """Where a ``Checkpoint`` keeps what it saves."""
    return Store(asked.options.directory, keep=asked.options.keep, notice=_say)


class CheckpointSession:
    """The checkpoints of one ``fit``.

    Args:
        asked: The user's callback.
        model: Compiled, built and distributed.
        collectives: Between those who decide together.
        membership: Who takes part.
        callbacks: All of the user's, in their order.
        state: Of the model.
        store: Where checkpoints go.
        resume: What training goes on from, or None.
        others: The ranks beside this one.
        presharded: Whether each rank has data of its own.
    """

    def __init__(
        self,
        asked: Checkpoint,
        model: keras.Model,
        collectives: Collectives,
        membership: Membership,
        callbacks: Sequence[Any],
        *,
        state: TrainingState,
        store: Store,
        resume: Resume | None,
        others: Peers,
        presharded: bool,
    ) -> None:
        self._asked = asked
        self._model = model
        self._collectives = collectives
        self._membership = membership
        self._callbacks = callbacks
        self._state = state
        self._store = store
        self._resume = resume
        self._others = others
        self._presharded = presharded

    def seed(self, fresh: int) -> int:
        """The seed of the data's orders: that of the checkpoint, else ``fresh``."""
        return fresh if self._resume is None else self._resume.progress.seed

    @contextmanager
    def keeping(self, epochs: EpochIterator, seed: int) -> Iterator[None]:
        """Within the block ``fit`` takes checkpoints.

        Args:
            epochs: Where it stands in its data; set to where the checkpoint was taken.
            seed: Of the data's orders.

        Raises:
            CheckpointError: The checkpoint belongs to another kind of data.
        """
        if self._resume is not None:
            self._resume.place(epochs)
        keeper = CheckpointLoop(
            self._asked.options,
            model=self._model,
            collectives=self._collectives,
            callbacks=self._callbacks,
            state=self._state,
            others=self._others,
            membership=self._membership,
            epochs=epochs,
            writer=BackgroundWriter(self._store, report.saved),
            resume=self._resume,
            seed=seed,
            presharded=self._presharded,
        )
        self._asked.keeper = keeper
        keeper.open()
        try:
            with self._membership.followed_by([keeper.take_over]):
                yield
        finally:
            self._asked.keeper = None
            self._model._initial_epoch = None
            keeper.close()


def _say(text: str) -> None:
    logger.warning(text)
