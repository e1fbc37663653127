"""Callbacks around the user's: input hooks, membership, and what all ranks must agree on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import RanksLostError
from hvdtrain.gradients.contributions import Contributions
from hvdtrain.keras.chief_failover import ChiefFailover
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.loss_so_far import LossSoFar
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_parts import has_own
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import initial_epoch, set_initial_epoch

__all__ = ["MeetAtEnd", "StopTogether", "list_callbacks", "stops_at_nan", "wrap_callbacks"]

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
    collectives: Collectives,
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
        _Progress(epochs),
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

    def __init__(self, collectives: Collectives) -> None:
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

    def __init__(self, collectives: Collectives, callbacks: Sequence[Any]) -> None:
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
        mine = mine or (self.model.run_eagerly and has_own(self.model, f"{loop}_step"))
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

    def __init__(self, collectives: Collectives) -> None:
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


class _Progress(keras.callbacks.Callback):
    """Tells the launcher how far ``fit`` is, which notices with that when a rank hangs."""

    def __init__(self, epochs: EpochIterator) -> None:
        super().__init__()
        self._epochs = epochs
        self._epoch = 0
        self._compiled = False
        self._learned = _Learned()

    @property
    def _tells(self) -> bool:
        return report.is_heard() and world.is_chief()

    def on_train_begin(self, logs: Any = None) -> None:
        report.phase("compiling")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._learned.begin_epoch()
        if self._compiled:
            report.phase("training")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch and not self._compiled and self._tells:
            # Resumed within an epoch: the metric holds the rows of an earlier run.
            self._learned.resume(self.model, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._compiled = True
        report.step(self._epochs.step, self._epoch)
        report.planned(self._total_steps(batch + 1))
        report.phase("training")
        self._epochs.input_wait.tell_often()
        if self._tells and self._learned.is_due():
            self._learned.tell(self.model, batch + 1, self._epochs.step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs.input_wait.tell()
        self._learned.end_epoch(self._epochs.step)
        report.phase("end of an epoch")

    def _total_steps(self, done: int) -> int | None:
        """The step with which ``fit`` ends unless it ends early; ``done`` are of this epoch."""
        steps = self._epochs.steps_per_epoch
        if steps is None or self.params is None:
            return None
        epochs_left = self.params["epochs"] - self._epoch
        return self._epochs.step - done + epochs_left * steps


class _Learned:
    """The samples that the ranks have trained on, and their loss, read about once a second.

    Reading waits for the device. Samples are the chief's times the number of ranks.
    """

    def __init__(self) -> None:
        self._due_s = 0.0
        self._samples = 0.0
        self._rows_per_step = 0.0
        self._step: int | None = None
        self._loss = 0.0
        self._before = LossSoFar()

    def is_due(self) -> bool:
        """Whether it is time to read."""
        return time.monotonic() >= self._due_s

    def begin_epoch(self) -> None:
        """Begin again with Keras' metric; what it held last of the epoch before was not read."""
        self._before = LossSoFar()

    def resume(self, model: keras.Model, steps: int) -> None:
        """Leave out the first ``steps`` of the epoch."""
        self._before = LossSoFar.of(model, steps)

    def tell(self, model: keras.Model, steps: int, step: int) -> None:
        """Read and report after so many ``steps`` of the epoch, and ``step`` of the training."""
        self._due_s = time.monotonic() + report.INTERVAL_S
        before, self._before = self._before, LossSoFar.of(model, steps)
        rows = self._before.rows - before.rows
        if rows <= 0:
            return
        self._rows_per_step = rows / max(1, self._before.steps - before.steps)
        if self._step is None:
            self._step = step - steps + before.steps
        self._count(step)
        self._loss = (self._before.loss_sum - before.loss_sum) / rows
        report.learned(self._samples, self._loss)

    def end_epoch(self, step: int) -> None:
        """Report the samples of the steps since the last reading, without reading again."""
        if self._step is not None:
            self._count(step)
            report.learned(self._samples, self._loss)

    def _count(self, step: int) -> None:
        if self._step is not None:
            self._samples += (step - self._step) * self._rows_per_step * world.size()
            self._step = step


class _After(keras.callbacks.Callback):
    """The callback after the user's: makes alike what they may have decided on one rank."""

    def __init__(
        self,
        collectives: Collectives,
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
        with self._failover.patiently():
            self._broadcast()
        epoch = self._collectives.broadcast_object(initial_epoch(self.model), name="initial epoch")
        set_initial_epoch(self.model, epoch)
        if self._membership.lose_chief():
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
        with self._failover.patiently():
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
