"""Callbacks around the user's: input hooks, membership, and what all ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import RanksLostError
from hvdtrain.gradients.contributions import Contributions
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.membership import Change, Membership
from hvdtrain.keras.model_parts import overrides
from hvdtrain.keras.progress_report import ReportProgress
from hvdtrain.keras.saving.callback_states import callback_states, restore_callbacks
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.private_api.keras import initial_epoch, set_initial_epoch

__all__ = [
    "CHIEF_ONLY",
    "ChiefFailover",
    "MeetAtEnd",
    "StopTogether",
    "list_callbacks",
    "stops_at_nan",
    "wrap_callbacks",
]


# For each loop the attribute with which a callback ends it, and the hooks that see its batches.
_LOOPS = {
    "train": (
        "stop_training",
        ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    ),
    "test": ("stop_evaluating", ("on_test_batch_begin", "on_test_batch_end")),
    "predict": ("stop_predicting", ("on_predict_batch_begin", "on_predict_batch_end")),
}


def list_callbacks(callbacks: Any) -> list[Any]:
    """The user's callbacks, however they were passed to ``fit``."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []


def wrap_callbacks(
    failover: ChiefFailover,
    collectives: Engine,
    membership: Membership,
    epochs: EpochIterator,
    contributions: Contributions,
    *,
    broadcast: Callable[[], None],
    join: Callable[[], None],
) -> list[Any]:
    """The user's callbacks as this rank runs them, between hvdtrain's own.

    A ``Checkpoint`` comes last: it saves what the others have decided, and resuming undoes what
    they do when training begins.

    ``broadcast`` gives all ranks the chief's state; it is called after the user's
    ``on_train_begin``, where a callback may have restored some on the chief. ``join`` makes the
    model the same on all ranks; it is called before the user's ``on_epoch_end``.
    """
    callbacks = failover.callbacks()
    others = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    before = _Before(membership, epochs, contributions, join)
    shares = [_ShareNaN(collectives)] if stops_at_nan(callbacks) else []
    after = _After(collectives, membership, failover, epochs, broadcast)
    return [
        before,
        ReportProgress(epochs),
        *shares,
        *others,
        # Waits patiently for the chief's callbacks as training begins, so the other needn't.
        after,
        StopTogether(collectives, callbacks),
        *checkpoints,
        _EndIfTooFew(membership),
    ]


class MeetAtEnd(keras.callbacks.Callback):
    """The first callback of ``predict``: a barrier, so that all ranks end when the last one does.

    What each has predicted is put together after the callbacks; then nobody waits for that.
    """

    def __init__(self, collectives: Engine) -> None:
        super().__init__()
        self._collectives = collectives

    def on_predict_end(self, logs: Any = None) -> None:
        self._collectives.barrier(name="end of predict")


class StopTogether(keras.callbacks.Callback):
    """Ends a loop on all ranks after the batch in which a callback of one rank has ended it.

    Comes after the user's callbacks. Ranks exchange a number after the first batch of each epoch,
    evaluation and prediction, and after every batch if a rank has code of the user's that can act
    then: a callback with hooks for batches, or a ``train_step`` that runs eagerly.
    """

    def __init__(self, collectives: Engine, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._collectives = collectives
        self._callbacks = callbacks
        self._every_batch = dict.fromkeys(_LOOPS, False)
        self._first = True

    def on_train_begin(self, logs: Any = None) -> None:
        self._begin("train")

    def on_test_begin(self, logs: Any = None) -> None:
        self._begin("test")

    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin("predict")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._first = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree("train")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree("test")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree("predict")

    def _begin(self, loop: str) -> None:
        _, hooks = _LOOPS[loop]
        mine = any(_is_users(getattr(entry, h, None)) for entry in self._callbacks for h in hooks)
        mine = mine or (self.model.run_eagerly and overrides(self.model, f"{loop}_step"))
        self._every_batch[loop] = self._any(mine, f"callbacks that see batches of {loop}")
        self._first = True

    def _agree(self, loop: str) -> None:
        if self._every_batch[loop] or self._first:
            self._first = False
            attribute, _ = _LOOPS[loop]
            stop = self._any(getattr(self.model, attribute), attribute)
            setattr(self.model, attribute, stop)

    def _any(self, mine: bool, name: str) -> bool:
        return bool(self._collectives.allreduce(np.array(bool(mine)), "max", name=name))


def _is_users(hook: Any) -> bool:
    """Whether a callback's hook is neither Keras' nor hvdtrain's."""
    package = (getattr(hook, "__module__", None) or "").split(".")[0]
    return hook is not None and package not in ("keras", "hvdtrain")


def stops_at_nan(callbacks: Sequence[Any]) -> bool:
    """Whether Keras' ``TerminateOnNaN`` is one of the callbacks."""
    return any(isinstance(entry, keras.callbacks.TerminateOnNaN) for entry in callbacks)


class _ShareNaN(keras.callbacks.Callback):
    """Shows a loss that is not finite on one rank to ``TerminateOnNaN`` on all ranks."""

    def __init__(self, collectives: Engine) -> None:
        super().__init__()
        self._collectives = collectives

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        mine = np.array(not np.isfinite((logs or {}).get("loss", 0.0)))
        if self._collectives.allreduce(mine, "max", name="finite loss") and not mine:
            logs["loss"] = float("nan")


class _Before(keras.callbacks.Callback):
    """The first callback of ``fit``: does what has to come before the user's callbacks."""

    def __init__(
        self,
        membership: Membership,
        epochs: EpochIterator,
        contributions: Contributions,
        join: Callable[[], None],
    ) -> None:
        super().__init__()
        self._membership = membership
        self._epochs = epochs
        self._contributions = contributions
        self._join = join
        self._verified = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._contributions.take()  # of steps outside of fit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epochs.on_epoch_begin(epoch)
        self._verified = False
        if self.params is not None:
            # Of the ranks there are now; only a change of the data by a callback comes later.
            self.params["steps"] = self._epochs.steps_per_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._membership.elastic:
            self._epochs.note_contributions(self._contributions.take())
            if self._membership.renew() and self.params is not None:
                left = self._epochs.steps_left
                self.params["steps"] = None if left is None else batch + 1 + left
        if not self._verified:
            self._verified = True
            self._epochs.sharded.verify()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs.sharded.on_epoch_end()
        self._join()
        # Whoever is the chief by now is to run its callbacks for this epoch.
        self._membership.renew()


class _After(keras.callbacks.Callback):
    """The callback after the user's: makes alike what they may have decided on one rank."""

    def __init__(
        self,
        collectives: Engine,
        membership: Membership,
        failover: ChiefFailover,
        epochs: EpochIterator,
        broadcast: Callable[[], None],
    ) -> None:
        super().__init__()
        self._collectives = collectives
        self._membership = membership
        self._failover = failover
        self._epochs = epochs
        self._broadcast = broadcast

    def on_train_begin(self, logs: Any = None) -> None:
        with self._failover.without_timeout():
            self._broadcast()
        epoch = self._collectives.broadcast_object(initial_epoch(self.model), name="initial epoch")
        set_initial_epoch(self.model, epoch)
        if self._membership.renew_and_check_chief_lost():
            raise RanksLostError(
                "The chief was lost while it gave the others its state as training began. Start "
                "the job again."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Callbacks may have changed the data, and a checkpoint restores random states after this.
        self._epochs.sharded.on_epoch_begin(epoch)
        if self.params is not None:
            self.params["steps"] = self._epochs.steps_per_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = np.array(bool(self.model.stop_training))
        with self._failover.without_timeout():
            stop = self._collectives.allreduce(mine, "max", name="stop training")
        self.model.stop_training = bool(stop)
        self._failover.share_states()


class _EndIfTooFew(keras.callbacks.Callback):
    """The last callback, after checkpoints: ends training if fewer ranks are left than must be."""

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        self._membership = membership

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._end_if_too_few()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_if_too_few()

    def _end_if_too_few(self) -> None:
        if self._membership.too_few is not None:
            raise self._membership.too_few


CHIEF_ONLY = (
    keras.callbacks.ModelCheckpoint,
    *([keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []),
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


"""Callbacks with effects outside the process; other ranks than the chief don't run them."""


_HOOKS = (
    *("on_train_begin", "on_train_end", "on_test_begin", "on_test_end"),
    *("on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end"),
)


class ChiefFailover:
    """Lets the chief's callbacks run on the chief alone, and on the next chief when it is lost."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        collectives: Engine,
        membership: Membership,
        verbose: Any,
    ) -> None:
        self._callbacks = callbacks
        self._collectives = collectives
        self._membership = membership
        self._verbose = verbose
        self._of_chief = [entry for entry in callbacks if isinstance(entry, CHIEF_ONLY)]
        self._states: Mapping[str, Any] = {}
        self._standbys: list[_StandbyCallback] = []

    def without_timeout(self) -> AbstractContextManager[None]:
        """Let operations in the block wait for the chief's callbacks without a time-out.

        They save the model as a rule, which may take long; callbacks of all ranks must be in time.
        """
        return self._collectives.without_timeout() if self._of_chief else nullcontext()

    def callbacks(self) -> list[Any]:
        """The user's callbacks as this rank runs them."""
        if self._membership.is_chief:
            return list(self._callbacks)
        if not self._membership.elastic:
            return [entry for entry in self._callbacks if not isinstance(entry, CHIEF_ONLY)]
        standbys = {id(entry): _StandbyCallback(entry) for entry in self._of_chief}
        self._standbys = list(standbys.values())
        if self._verbose:
            # Keras' own exists on the chief only.
            self._standbys.append(
                _StandbyCallback(keras.callbacks.ProgbarLogger(), verbose=self._verbose)
            )
        ours = [standbys.get(id(entry), entry) for entry in self._callbacks]
        return [*ours, *self._standbys[len(standbys) :]]

    def share_states(self) -> None:
        """Let all ranks know what the chief's callbacks remember; collective."""
        if not self._membership.elastic or not self._of_chief:
            return
        if self._membership.is_chief:
            self._states, _ = callback_states(self._of_chief)
        self._states = self._collectives.broadcast_object(
            self._states, name="states of the chief's callbacks", replicated=True
        )

    def take_over(self, change: Change) -> None:
        """Begin to run the chief's callbacks, if this rank is the chief now."""
        if self._membership.is_chief and self._standbys:
            restore_callbacks(self._of_chief, self._states, {})
            for standby in self._standbys:
                standby.act()
            self._standbys = []


class _StandbyCallback(keras.callbacks.Callback):
    """A callback of the chief on another rank; does nothing until it is to act.

    Args:
        verbose: How much Keras is to print on it, where that differs from the others.
    """

    def __init__(self, callback: Any, verbose: Any = None) -> None:
        super().__init__()
        self._callback = callback
        self._verbose = verbose
        self._epoch: int | None = None
        self._acts = False

    def act(self) -> None:
        """Go on where the chief's own was lost: in training, perhaps within an epoch."""
        callback = self._callback
        params = dict(self.params or {})
        if self._verbose is not None:
            params["verbose"] = self._verbose
        callback.set_params(params)
        callback.set_model(self.model)
        self._acts = True
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
        # A backup is restored when training begins, and that has been.
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            callback.on_train_begin()
        if self._epoch is not None:
            callback.on_epoch_begin(self._epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.call("on_epoch_begin", epoch, logs)
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.call("on_epoch_end", epoch, logs)
        self._epoch = None

    def call(self, hook: str, *args: Any, **options: Any) -> None:
        """Hand a hook on, once this acts."""
        if self._acts:
            getattr(self._callback, hook)(*args, **options)


def _handed_on(hook: str) -> Callable[..., None]:
    def call(self: _StandbyCallback, *args: Any, **options: Any) -> None:
        self.call(hook, *args, **options)

    call.__name__ = hook
    return call


for _hook in _HOOKS:
    setattr(_StandbyCallback, _hook, _handed_on(_hook))
