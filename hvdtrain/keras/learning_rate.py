"""The learning rate and the number of ranks: scaled by it, warmed up, followed when some are lost.

The rule of Goyal et al. (2017), "Accurate, Large Minibatch SGD": the rate is proportional to the
joint batch. A program follows it by calling ``scale_learning_rate``; where it has, the rate also
follows when ranks of an elastic job are lost and the joint batch becomes smaller. A rate that was
not scaled stays as it is.
"""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.keras.membership import Change
from hvdtrain.keras.model_parts import optimizers_of
from hvdtrain.keras.optimizer_patch import plain_optimizers
from hvdtrain.private_api.keras import RATE, rate_of, set_untracked

__all__ = [
    "WarmUp",
    "prepare_rescaling",
    "rescale_rate",
    "rescale_restored_rate",
    "scale_learning_rate",
]

_FACTOR = "_hvdtrain_rate_factor"

_program_scales = False
"""Whether the program has made its learning rate proportional to the number of ranks."""


def scale_learning_rate(rate: float) -> float:
    """``rate`` times the number of ranks, as the joint batch is that many times larger.

    With parameter servers it is times as many workers as one update is made of: all of them but
    for backup workers, or one where each gradient is applied by itself.

    The linear scaling rule of Goyal et al. (2017), "Accurate, Large Minibatch SGD". In an elastic
    job the optimizer's rate then also follows when ranks are lost: it is multiplied by how many
    there are now over how many there were before. What a schedule gives is multiplied likewise.
    """
    global _program_scales
    _program_scales = True
    return rate * world.settings().gradients_in_update(world.size())


def prepare_rescaling(optimizer: Any) -> None:
    """Let ``rescale_rate`` reach what ``optimizer`` computes; before its step is traced.

    A schedule's values go through a factor, which is 1 until then. The schedule itself stays the
    optimizer's own, and so does what is saved. Doing it twice changes nothing.
    """
    if not _program_scales:
        return
    for plain in plain_optimizers(optimizer):
        if not isinstance(rate_of(plain), keras.Variable) and not hasattr(plain, _FACTOR):
            _multiply_rate(plain)


def rescale_rate(optimizer: Any, before: int, now: int) -> None:
    """Change the learning rate after the number of ranks, where the program has scaled it."""
    rescale_restored_rate(optimizer, before, now)
    if not _program_scales:
        return
    for plain in plain_optimizers(optimizer):
        factor = getattr(plain, _FACTOR, None)
        if factor is not None:
            factor.assign(factor * (now / before))


def rescale_restored_rate(optimizer: Any, before: int, now: int) -> None:
    """Scale the learning rate of an optimizer whose state has just been restored from a checkpoint.

    That holds a rate which is a plain number, as it was with ``before`` ranks. A rate that is
    computed is not in it: it is the program's, which has scaled it for the ranks of now.
    """
    if not _program_scales:
        return
    for plain in plain_optimizers(optimizer):
        rate = rate_of(plain)
        if isinstance(rate, keras.Variable):
            rate.assign(rate * (now / before))


def _multiply_rate(optimizer: Any) -> None:
    """Put a variable factor before the rate that a plain optimizer computes in each step."""
    factor = keras.Variable(1.0, dtype="float32", trainable=False, name="rate_factor")
    computed = getattr(optimizer, RATE)

    def multiplied() -> Any:
        return keras.ops.multiply(computed(), factor)

    set_untracked(optimizer, _FACTOR, factor)
    set_untracked(optimizer, RATE, multiplied)


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
        steps_per_epoch: How many joint steps an epoch has, for data whose length is not known;
            ignored where ``fit`` knows it.

    Raises:
        ModelError: When training begins, if the optimizer follows a schedule, or if it is not
            known how many steps an epoch has.
    """

    def __init__(
        self, *, initial: float, epochs: float = 5, steps_per_epoch: int | None = None
    ) -> None:
        super().__init__()
        if not epochs > 0 or not initial >= 0:
            raise ModelError(
                f"WarmUp takes epochs above 0 and an initial rate of at least 0; received "
                f"epochs={epochs}, initial={initial}."
            )
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ModelError(
                f"WarmUp takes steps_per_epoch of at least 1, got {steps_per_epoch}; pass the "
                "number of joint steps in an epoch."
            )
        self._initial = initial
        self._epochs = epochs
        self._given_steps = steps_per_epoch
        self._target = 0.0
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        optimizers = optimizers_of(self.model)
        if len(optimizers) != 1:
            raise ModelError(
                f"WarmUp sets the rate of one optimizer, and this model has {len(optimizers)}. Set "
                "their rates in a callback of your own."
            )
        (optimizer,) = optimizers
        plain = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(rate_of(plain), keras.optimizers.schedules.LearningRateSchedule):
            raise ModelError(
                "WarmUp sets the learning rate itself, and this optimizer follows a schedule. "
                "Use a schedule that warms up, as keras.optimizers.schedules.CosineDecay can, or a "
                "plain number."
            )
        if self._steps() is None:
            raise ModelError(
                "WarmUp raises the rate in each step of an epoch, and the length of this data is "
                "not known; pass steps_per_epoch to WarmUp, or to fit with data that repeats."
            )
        self._target = float(keras.ops.convert_to_tensor(optimizer.learning_rate))

    def follow(self, change: Change) -> None:
        """Aim at the rate of the ranks that are left, where the program has scaled it."""
        if _program_scales:
            self._target *= len(change.now) / len(change.before)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        steps = self._steps() or 1
        done = (self._epoch + min(batch / steps, 1.0)) / self._epochs
        if done < 1 + 1 / steps:
            share = min(done, 1.0)
            rate = self._initial + share * (self._target - self._initial)
            optimizers_of(self.model)[0].learning_rate = rate

    def _steps(self) -> int | None:
        """Return how many steps an epoch has; None if that is not known."""
        return (self.params or {}).get("steps") or self._given_steps
