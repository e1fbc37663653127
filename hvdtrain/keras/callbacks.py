"""What happens around Keras' loops: input hooks, agreement, chief-only callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.base import Collectives
from hvdtrain.errors import ModelError
from hvdtrain.keras.data import ShardedInput
from hvdtrain.keras.epochs import Epochs
from hvdtrain.keras.replicas import average_statistics
from hvdtrain.keras.reports import Reports
from hvdtrain.keras.saving.checkpoint import Checkpoint

__all__ = ["CHIEF_ONLY", "WarmUp", "list_callbacks", "wrap_callbacks"]

CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
"""Callbacks with effects outside the process; on other ranks than the chief they are left out."""


def list_callbacks(callbacks: Any) -> list[Any]:
    """The user's callbacks, however they were passed to ``fit``."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []


def wrap_callbacks(
    callbacks: list[Any],
    collectives: Collectives,
    sharded: ShardedInput,
    epochs: Epochs,
    broadcast: Callable[[], None],
) -> list[Any]:
    """The user's callbacks as this rank runs them, between hvdtrain's own.

    A ``Checkpoint`` comes last: it saves what the others have decided, and resuming undoes what
    they do when training begins.

    Args:
        callbacks: The user's.
        collectives: The engine.
        sharded: The input, whose hooks are called.
        epochs: Told which epoch begins; tells the launcher's reports the step.
        broadcast: Gives all ranks the chief's state; called after the user's ``on_train_begin``,
            where a callback may have restored some on the chief.
    """
    if collectives.rank > 0:
        callbacks = [callback for callback in callbacks if not isinstance(callback, CHIEF_ONLY)]
    others = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    before = _Before(collectives, sharded, epochs)
    after = _After(collectives, broadcast)
    return [before, Reports(epochs), *others, after, *checkpoints]


class _Before(keras.callbacks.Callback):
    """First in the list: what must have happened before the user's callbacks see it."""

    def __init__(self, collectives: Collectives, sharded: ShardedInput, epochs: Epochs) -> None:
        super().__init__()
        self._collectives = collectives
        self._sharded = sharded
        self._epochs = epochs
        self._verified = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._sharded.on_epoch_begin(epoch)
        self._epochs.on_epoch_begin(epoch)
        self._verified = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._verified:
            self._verified = True
            self._sharded.verify()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._sharded.on_epoch_end()
        average_statistics(self.model, self._collectives)


class _After(keras.callbacks.Callback):
    """Last in the list: makes alike what the user's callbacks may have decided on one rank."""

    def __init__(self, collectives: Collectives, broadcast: Callable[[], None]) -> None:
        super().__init__()
        self._collectives = collectives
        self._broadcast = broadcast

    def on_train_begin(self, logs: Any = None) -> None:
        self._broadcast()
        self.model._initial_epoch = self._collectives.broadcast_object(
            self.model._initial_epoch, name="initial epoch"
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = np.array(bool(self.model.stop_training))
        self.model.stop_training = bool(
            self._collectives.allreduce(mine, "max", name="stop training")
        )


class WarmUp(keras.callbacks.Callback):
    """Raises the learning rate linearly over the first epochs, as large joint batches need.

    With N ranks a joint batch is N times as large, and the learning rate is usually multiplied by
    N; started at once that diverges. Goyal et al. (2017), "Accurate, Large Minibatch SGD", section
    2.2: go linearly from the rate of one process to N times that within five epochs.

    Example::

        model.compile(optimizer=keras.optimizers.SGD(hvdtrain.scale_learning_rate(0.01)), ...)
        model.fit(..., callbacks=[hvdtrain.WarmUp(initial=0.01, epochs=5)])

    Args:
        initial: The learning rate to start from.
        epochs: In how many epochs the optimizer's own rate is reached; above 0.

    Raises:
        ModelError: When training begins, if the optimizer follows a schedule.
    """

    def __init__(self, *, initial: float, epochs: float = 5) -> None:
        super().__init__()
        if not epochs > 0 or not initial >= 0:
            raise ModelError(
                f"WarmUp takes epochs above 0 and an initial rate of at least 0; received "
                f"epochs={epochs}, initial={initial}."
            )
        self._initial = initial
        self._epochs = epochs
        self._target = 0.0
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        plain = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(plain._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ModelError(
                "WarmUp sets the learning rate itself, and this optimizer follows a schedule. "
                "Use a schedule that warms up, as keras.optimizers.schedules.CosineDecay can, or a "
                "plain number."
            )
        self._target = float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        steps = (self.params or {}).get("steps") or 1
        done = (self._epoch + batch / steps) / self._epochs
        if done < 1 or (done < 1 + 1 / steps):
            share = min(done, 1.0)
            rate = self._initial + share * (self._target - self._initial)
            self.model.optimizer.learning_rate = rate
