"""``hvdtrain.Checkpoint``, the callback that saves and resumes a training, and its setup."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras

from hvdtrain.checkpoint import Store
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.saving.checkpoint_schedule import CheckpointOptions
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.saving.resume import find
from hvdtrain.keras.saving.training_state import TrainingState

__all__ = ["Checkpoint", "begin_session", "find_checkpoint_callback", "open_store"]

logger = logging.getLogger(__package__)


class Checkpoint(keras.callbacks.Callback):
    """Saves a training while it runs, and resumes it when the program is started again.

    ::

        model.fit(x, y, epochs=10, callbacks=[hvdtrain.Checkpoint("runs/mnist", every_s=60)])

    The chief writes weights, optimizer, callbacks, position in the data and the random states of
    all ranks in the background. The next ``fit`` with the same directory resumes from the newest
    intact checkpoint, even in the middle of an epoch: with the same number of ranks exactly as if
    it had never been stopped; with another number of ranks, on the samples of the epoch that had
    not been seen. The other ranks need no access to the directory. Use one directory for each
    ``fit`` of a program.

    On SIGTERM, SIGUSR1 or SIGUSR2, on any rank, all ranks save a checkpoint after the same step and
    end with exit code 75: start the program again to resume.

    Args:
        directory: Folder of the checkpoints.
        every_steps: Steps between two checkpoints.
        every_s: Seconds between two checkpoints. Without both of them, save at the end of every
            epoch; the end of the training is always saved.
        keep: How many of the newest steps to keep a checkpoint of.
        export: Also save the model as a ``.keras`` file at this path, at the end of each epoch
            after which a checkpoint is taken, and when training resumes from one of these.
        on_error: Reaction to a full disk and the like: ``"warn"`` once and continue, or
            ``"raise"`` on every rank.

    Raises:
        ConfigurationError: An argument can't be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        export: str | os.PathLike[str] | None = None,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        self.options = CheckpointOptions(
            directory=os.fspath(directory),
            every_steps=every_steps,
            every_s=every_s,
            keep=keep,
            export=None if export is None else os.fspath(export),
            on_error=on_error,
        )
        # Does the work, within a ``fit`` of a distributed model.
        self.session: CheckpointSession | None = None

    @property
    def _running(self) -> CheckpointSession:
        if self.session is None:
            raise ModelError(
                "hvdtrain.Checkpoint needs a model that was given to hvdtrain.distribute(model), "
                "after hvdtrain.init(), even for a single process."
            )
        return self.session

    @property
    def _last_epoch(self) -> int:
        return int((self.params or {}).get("epochs", 1))

    def on_train_begin(self, logs: Any = None) -> None:
        self._running.on_train_begin(self._last_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._running.on_batch_end(batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._running.on_epoch_begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._running.on_epoch_end(epoch, logs or {}, last=epoch + 1 >= self._last_epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        if self.session is not None:
            self.session.on_test_begin()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.session is not None:
            self.session.on_test_batch_end()

    def on_train_end(self, logs: Any = None) -> None:
        self._running.on_train_end()


def find_checkpoint_callback(callbacks: Sequence[Any]) -> Checkpoint | None:
    """Return the ``Checkpoint`` among the callbacks, or None.

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
    options: CheckpointOptions,
    model: keras.Model,
    collectives: Engine,
    membership: Membership,
    callbacks: Sequence[Any],
    samples: keras.Variable,
    *,
    averaging: WeightAveraging | None,
    feedback: ErrorFeedback | None,
    join: Callable[[], None],
) -> CheckpointSession:
    """Set up the checkpoints of a ``fit`` in which all ranks make each step together; collective.

    Args:
        averaging: Averages the weights, if ranks update their own in between.
        feedback: Keeps the unsent parts of gradients, if they are compressed.
        join: Makes the weights of all ranks equal.

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
    # Other ranks use theirs only when they become the chief.
    store = open_store(options)
    found = find(store if membership.rank == 0 else None, state, collectives)
    return CheckpointSession(options, state, membership, store, found, averaging, join)


def open_store(options: CheckpointOptions) -> Store:
    """Return the store for the user's directory."""
    return Store(options.directory, keep=options.keep, notice=logger.warning)
