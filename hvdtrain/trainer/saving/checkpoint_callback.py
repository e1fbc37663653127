"""``hvdtrain.Checkpoint``, the callback that saves and resumes a training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras

from hvdtrain.checkpoint import Store
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.trainer.membership import Membership
from hvdtrain.trainer.saving.checkpoint_schedule import CheckpointOptions
from hvdtrain.trainer.saving.checkpoint_session import CheckpointSession
from hvdtrain.trainer.saving.training_progress import find_checkpoint
from hvdtrain.trainer.saving.training_state import TrainingState

if TYPE_CHECKING:
    from hvdtrain.trainer.local_sgd.weight_averaging import WeightAveraging

__all__ = ["Checkpoint", "begin_session", "find_checkpoint_callback", "open_store"]

logger = logging.getLogger(__package__)


class Checkpoint(keras.callbacks.Callback):
    """Callback to save checkpoints of a training and to resume from the newest one.

    The chief writes the weights, the states of the optimizer and the callbacks, the position in the
    data, and the random states of all ranks. It writes in the background, and the other ranks need
    no access to the directory. Use a separate directory for each ``fit``.

    The next ``fit`` with the same directory resumes from the newest intact checkpoint, even within
    an epoch. With the same number of ranks, training continues exactly as if it had not been
    interrupted. With a different number of ranks, it continues on the remaining samples of the
    epoch.

    After SIGTERM, SIGUSR1 or SIGUSR2 on any rank, all ranks save a checkpoint after the same step
    and exit with code 75. Start the program again to resume.

    Example::

        checkpoint = hvdtrain.Checkpoint("runs/mnist", every_s=60)
        model.fit(x, y, epochs=10, callbacks=[checkpoint])

    Args:
        directory: Path of the checkpoint directory.
        every_steps: Number of steps between checkpoints.
        every_s: Seconds between checkpoints. If neither ``every_steps`` nor ``every_s`` is given, a
            checkpoint is saved at the end of every epoch. A checkpoint is always saved at the end
            of the training.
        keep: Number of steps whose checkpoints are kept.
        export: Path of a ``.keras`` file. The model is saved to this file with every checkpoint at
            the end of an epoch, and when training resumes from such a checkpoint.
        on_error: ``"warn"`` to log disk errors once and continue, or ``"raise"`` to raise them on
            every rank.

    Raises:
        ConfigurationError: If an argument is not valid.
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
        # Set by ``fit`` of a distributed model.
        self.session: CheckpointSession | None = None

    @property
    def _active_session(self) -> CheckpointSession:
        if self.session is None:
            raise ModelError(
                "hvdtrain.Checkpoint needs a distributed model. Call hvdtrain.init() and "
                "hvdtrain.distribute(model) first, even for a single process."
            )
        return self.session

    @property
    def _epochs(self) -> int:
        return int((self.params or {}).get("epochs", 1))

    def on_train_begin(self, logs: Any = None) -> None:
        """Set the first epoch if training resumes from a checkpoint."""
        self._active_session.on_train_begin(self._epochs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save a checkpoint if it is due."""
        self._active_session.on_batch_end(batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restore the state if training resumes within this epoch."""
        self._active_session.on_epoch_begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save a checkpoint if it is due."""
        self._active_session.on_epoch_end(epoch, logs or {}, last=epoch + 1 >= self._epochs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Copy the values that the validation will change, such as metrics."""
        if self.session is not None:
            self.session.on_test_begin()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save a checkpoint if a rank has received a signal."""
        if self.session is not None:
            self.session.on_test_batch_end()

    def on_train_end(self, logs: Any = None) -> None:
        """Wait until the last checkpoint has been written to the disk."""
        self._active_session.on_train_end()


def find_checkpoint_callback(callbacks: Sequence[Any]) -> Checkpoint | None:
    """Return the ``Checkpoint`` among the callbacks, or None if it is not used.

    Raises:
        ModelError: If there is more than one.
    """
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(checkpoints) > 1:
        folders = ", ".join(checkpoint.options.directory for checkpoint in checkpoints)
        raise ModelError(
            f"fit accepts one hvdtrain.Checkpoint callback, got {len(checkpoints)} ({folders}); "
            "combine their every_steps, every_s and keep."
        )
    return checkpoints[0] if checkpoints else None


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
    """Create the checkpoint session of a ``fit``. All ranks must call this.

    This function is used if all ranks are always at the same step. Jobs with parameter servers use
    ``WorkerSession`` instead. ``TrainingState`` and ``CheckpointSession`` describe the arguments.

    Raises:
        CheckpointError: If all checkpoints are damaged, or the newest one belongs to a different
            model.
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
    # Other ranks use their store only if they become the chief.
    store = open_store(options)
    checkpoint = find_checkpoint(store if membership.rank == 0 else None, state, collectives)
    return CheckpointSession(options, state, membership, store, checkpoint, averaging, join)


def open_store(options: CheckpointOptions) -> Store:
    """Return the object that reads and writes the checkpoints in the user's directory."""
    return Store(options.directory, keep=options.keep, notice=logger.warning)
