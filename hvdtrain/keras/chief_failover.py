"""Callbacks that run on the chief alone, and on another rank when the chief is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from hvdtrain.collectives.interface import Collectives
from hvdtrain.keras.membership import Change, Membership
from hvdtrain.keras.saving.callback_states import callback_states, restore_callbacks

__all__ = ["CHIEF_ONLY", "ChiefFailover"]

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
        collectives: Collectives,
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

    def patiently(self) -> AbstractContextManager[None]:
        """Let operations in the block wait for the chief's callbacks without a time-out.

        They save the model as a rule, which may take long; callbacks of all ranks must be in time.
        """
        return self._collectives.patiently() if self._of_chief else nullcontext()

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
