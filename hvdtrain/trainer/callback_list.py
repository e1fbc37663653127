"""The callbacks that run in ``fit``: hvdtrain's own callbacks around the user's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import RanksLostError
from hvdtrain.gradients.ranks import Contributions
from hvdtrain.private_api.keras import initial_epoch, set_initial_epoch
from hvdtrain.trainer.epoch_iterator import EpochIterator
from hvdtrain.trainer.membership import Change, Membership
from hvdtrain.trainer.model_parts import overrides
from hvdtrain.trainer.progress import ReportProgress
from hvdtrain.trainer.saving.callback_states import callback_states, restore_callbacks
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint

__all__ = [
    "CHIEF_ONLY",
    "CallbacksOfSteps",
    "ChiefFailover",
    "StopTogether",
    "list_callbacks",
    "stops_at_nan",
]

CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    *([keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []),
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
"""Callbacks with effects outside the process, which only the chief runs."""

# For each loop: the model's attribute that stops it, and the callback hooks for its batches.
_LOOPS = {
    "train": (
        "stop_training",
        ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    ),
    "test": ("stop_evaluating", ("on_test_batch_begin", "on_test_batch_end")),
    "predict": ("stop_predicting", ("on_predict_batch_begin", "on_predict_batch_end")),
}


def list_callbacks(callbacks: Any) -> list[Any]:
    """Return the argument ``callbacks`` of ``fit``, converted to a list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []


def stops_at_nan(callbacks: Sequence[Any]) -> bool:
    """Return whether ``TerminateOnNaN`` is among the callbacks."""
    return any(isinstance(entry, keras.callbacks.TerminateOnNaN) for entry in callbacks)


class CallbacksOfSteps(keras.callbacks.CallbackList):
    """The callbacks of ``fit``, which are not called for steps without data."""

    def __init__(self, callbacks: list[Any], iterator: EpochIterator, **options: Any) -> None:
        super().__init__(callbacks, add_history=True, **options)
        self._iterator = iterator

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks before a step."""
        if not self._iterator.is_idle:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks after a step."""
        if not self._iterator.is_idle:
            super().on_train_batch_end(batch, logs)


class StopTogether(keras.callbacks.Callback):
    """Stops training on all ranks if a callback of one rank sets ``stop_training``.

    Evaluation and prediction stop on all ranks too, if a callback of one rank stops them.

    Ranks exchange a flag after the first batch of each epoch, evaluation and prediction. They
    exchange the flag after every batch if user code runs after every batch on some rank. Such code
    is a callback with hooks for batches, or a custom ``train_step`` that runs eagerly.
    """

    def __init__(self, collectives: Engine, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._collectives = collectives
        self._callbacks = callbacks
        self._every_batch = dict.fromkeys(_LOOPS, False)
        self._first = True
        for loop in _LOOPS:
            setattr(self, f"on_{loop}_begin", partial(self._begin, loop))
            setattr(self, f"on_{loop}_batch_end", partial(self._agree, loop))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Make ranks exchange the flag after the first batch of the epoch."""
        self._first = True

    def _begin(self, loop: str, logs: Any = None) -> None:
        _, hooks = _LOOPS[loop]
        own = any(_is_users(getattr(entry, h, None)) for entry in self._callbacks for h in hooks)
        own = own or (self.model.run_eagerly and overrides(self.model, f"{loop}_step"))
        self._every_batch[loop] = self._any(own, f"callbacks that see batches of {loop}")
        self._first = True

    def _agree(self, loop: str, batch: int, logs: Any = None) -> None:
        if self._every_batch[loop] or self._first:
            self._first = False
            attribute, _ = _LOOPS[loop]
            stop = self._any(getattr(self.model, attribute), attribute)
            setattr(self.model, attribute, stop)

    def _any(self, flag: bool, name: str) -> bool:
        return bool(self._collectives.allreduce(np.array(bool(flag)), "max", name=name))


def _is_users(hook: Any) -> bool:
    """Return whether a hook is user code, defined neither by Keras nor by hvdtrain."""
    function = hook.func if isinstance(hook, partial) else hook
    package = (getattr(function, "__module__", None) or "").split(".")[0]
    return hook is not None and package not in ("keras", "hvdtrain")


def _share_nan(collectives: Engine) -> keras.callbacks.Callback:
    """Return a callback that ends training on all ranks if one rank's loss is not finite."""

    def share(batch: int, logs: Any) -> None:
        non_finite = np.array(not np.isfinite((logs or {}).get("loss", 0.0)))
        if collectives.allreduce(non_finite, "max", name="finite loss") and not non_finite:
            logs["loss"] = float("nan")

    return keras.callbacks.LambdaCallback(on_train_batch_end=share)


def _stop_if_too_few(membership: Membership) -> keras.callbacks.Callback:
    """Return a callback that raises an error, after ``Checkpoint``, if too few ranks are left."""

    def check(number: int, logs: Any) -> None:
        if membership.too_few is not None:
            raise membership.too_few

    return keras.callbacks.LambdaCallback(on_train_batch_end=check, on_epoch_end=check)


class _Before(keras.callbacks.Callback):
    """The first callback in ``fit``. It updates the data and the list of remaining ranks."""

    def __init__(
        self,
        membership: Membership,
        epochs: EpochIterator,
        contributions: Contributions,
        synchronize: Callable[[], None],
    ) -> None:
        super().__init__()
        self._membership = membership
        self._epochs = epochs
        self._contributions = contributions
        self._synchronize = synchronize
        self._verified = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._contributions.take()  # discard those of steps outside of fit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epochs.on_epoch_begin(epoch)
        self._verified = False
        if self.params is not None:
            # ChiefFailover sets this again, because callbacks may change the data.
            self.params["steps"] = self._epochs.steps_per_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._membership.elastic:
            self._epochs.record_contributions(self._contributions.take())
            if self._membership.renew() and self.params is not None:
                left = self._epochs.steps_left
                self.params["steps"] = None if left is None else batch + 1 + left
        if not self._verified:
            self._verified = True
            self._epochs.sharded.verify()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs.sharded.on_epoch_end()
        self._synchronize()
        # If the chief was lost, the next chief must run the chief's callbacks for this epoch.
        self._membership.renew()


class ChiefFailover(keras.callbacks.Callback):
    """Runs after the user's callbacks in ``fit``, and makes their decisions equal on all ranks.

    For example, if a callback of one rank stops training, training stops on all ranks. Callbacks of
    the ``CHIEF_ONLY`` classes run only on the chief. If the chief is lost, these callbacks run on
    the next chief.

    Args:
        callbacks: The user's callbacks.
        verbose: Verbosity of ``fit``.
        broadcast: Function that copies the model's state from the chief to all ranks. It is called
            when training begins, because a callback of the chief may have loaded weights from a
            file.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        collectives: Engine,
        membership: Membership,
        epochs: EpochIterator,
        *,
        verbose: Any,
        broadcast: Callable[[], None],
    ) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._collectives = collectives
        self._membership = membership
        self._epochs = epochs
        self._verbose = verbose
        self._broadcast = broadcast
        self._of_chief = [entry for entry in callbacks if isinstance(entry, CHIEF_ONLY)]
        self._states: Mapping[str, Any] = {}
        self._standbys: list[_StandbyCallback] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Copy the state, which a callback of the chief may have restored, to all ranks."""
        with self._without_timeout():
            self._broadcast()
        epoch = self._collectives.broadcast_object(initial_epoch(self.model), name="initial epoch")
        set_initial_epoch(self.model, epoch)
        if self._membership.renew_and_check_chief():
            raise RanksLostError(
                "The chief was lost while it sent its state to the other ranks at the beginning of "
                "the training. Start the job again."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the epoch's data after the user's callbacks, which may change the data."""
        # This must happen before a checkpoint restores the random states.
        self._epochs.sharded.on_epoch_begin(epoch)
        if self.params is not None:
            self.params["steps"] = self._epochs.steps_per_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop training on all ranks if a callback stopped it on one rank."""
        stop = np.array(bool(self.model.stop_training))
        with self._without_timeout():
            stop = self._collectives.allreduce(stop, "max", name="stop training")
        self.model.stop_training = bool(stop)
        self._share_states()

    def _without_timeout(self) -> AbstractContextManager[None]:
        """Wait for the chief without a time-out if its callbacks may save a large model."""
        return self._collectives.without_timeout() if self._of_chief else nullcontext()

    def wrapped(self, contributions: Contributions, synchronize: Callable[[], None]) -> list[Any]:
        """Return the callbacks of this rank's ``fit``: the user's callbacks between hvdtrain's own.

        ``synchronize`` is a function that makes the model equal on all ranks. It is called before
        ``on_epoch_end`` of the user's callbacks.
        """
        callbacks = self._own_callbacks()
        checkpoints = [entry for entry in callbacks if isinstance(entry, Checkpoint)]
        return [
            _Before(self._membership, self._epochs, contributions, synchronize),
            ReportProgress(self._epochs),
            *([_share_nan(self._collectives)] if stops_at_nan(callbacks) else []),
            *(entry for entry in callbacks if entry not in checkpoints),
            # When training begins, ``self`` waits for the chief's callbacks without a time-out.
            # StopTogether has a time-out, so it comes afterwards.
            self,
            StopTogether(self._collectives, callbacks),
            # Checkpoints come after other callbacks, to save what these decided and to override
            # what they restored.
            *checkpoints,
            _stop_if_too_few(self._membership),
        ]

    def _own_callbacks(self) -> list[Any]:
        if self._membership.is_chief:
            return list(self._callbacks)
        if not self._membership.elastic:
            return [entry for entry in self._callbacks if not isinstance(entry, CHIEF_ONLY)]
        standbys = {id(entry): _StandbyCallback(entry) for entry in self._of_chief}
        # Keras adds its own progress bar on the chief only.
        bar = keras.callbacks.ProgbarLogger()
        bars = [_StandbyCallback(bar, verbose=self._verbose)] if self._verbose else []
        self._standbys = [*standbys.values(), *bars]
        return [*(standbys.get(id(entry), entry) for entry in self._callbacks), *bars]

    def _share_states(self) -> None:
        """Send the states of the chief's callbacks to all ranks of an elastic job."""
        if not self._membership.elastic or not self._of_chief:
            return
        if self._membership.is_chief:
            self._states, _ = callback_states(self._of_chief)
        self._states = self._collectives.broadcast_object(
            self._states, name="states of the chief's callbacks", replicated=True
        )

    def on_change(self, change: Change) -> None:
        """Activate the chief's callbacks if this rank has become the chief."""
        if self._membership.is_chief and self._standbys:
            restore_callbacks(self._of_chief, self._states, {})
            for standby in self._standbys:
                standby.activate()
            self._standbys = []


class _StandbyCallback(keras.callbacks.Callback):
    """Wraps a chief-only callback on a rank that is not the chief.

    The wrapped callback does nothing until ``activate`` is called, which happens if this rank
    becomes the chief. If ``verbose`` is not given, the callback uses the verbosity of ``fit``.
    """

    def __init__(self, callback: Any, verbose: Any = None) -> None:
        super().__init__()
        self._callback = callback
        self._verbose = verbose
        self._epoch: int | None = None
        self._active = False
        for when in ("begin", "end"):
            for hook in (
                f"train_{when}",
                f"test_{when}",
                f"train_batch_{when}",
                f"test_batch_{when}",
            ):
                setattr(self, f"on_{hook}", partial(self._forward, f"on_{hook}"))

    def activate(self) -> None:
        """Start the wrapped callback in the middle of training, which may be within an epoch."""
        callback = self._callback
        params = dict(self.params or {})
        if self._verbose is not None:
            params["verbose"] = self._verbose
        callback.set_params(params)
        callback.set_model(self.model)
        self._active = True
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
        # BackupAndRestore would restore a backup here, but training has begun already.
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            callback.on_train_begin()
        if self._epoch is not None:
            callback.on_epoch_begin(self._epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._forward("on_epoch_begin", epoch, logs)
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._forward("on_epoch_end", epoch, logs)
        self._epoch = None

    def _forward(self, hook: str, *args: Any, **options: Any) -> None:
        if self._active:
            getattr(self._callback, hook)(*args, **options)
