"""Learning rates in proportion to the number of ranks, with a warmup.

The linear scaling rule of Goyal et al. (2017), "Accurate, Large Minibatch SGD", makes the rate
proportional to the number of samples in the batches of all ranks. A program applies this rule by
calling ``scale_learning_rate``. In this case, the rate is rescaled when an elastic job loses ranks.
If the program never calls ``scale_learning_rate``, its rate is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import RATE, learning_rate_of, set_untracked
from hvdtrain.trainer.membership import Change
from hvdtrain.trainer.model_parts import optimizers_of
from hvdtrain.trainer.optimizer_patch import plain_optimizers

__all__ = [
    "WarmUp",
    "has_rate_factor",
    "prepare_rescaling",
    "rescale_rate",
    "rescale_restored_rate",
    "scale_learning_rate",
]

_FACTOR = "_hvdtrain_rate_factor"

_program_scales = False
"""Whether the program has called ``scale_learning_rate``."""


def scale_learning_rate(rate: float) -> float:
    """Multiply a learning rate by the number of ranks.

    With N ranks, each step trains on N times as many samples, so the rate grows by the same factor.
    This is the linear scaling rule of Goyal et al. (2017), "Accurate, Large Minibatch SGD". In a
    job with parameter servers, the factor is the number of workers whose gradients are averaged in
    an update. Backup workers are not counted. If the servers apply each gradient separately, the
    factor is 1.

    When an elastic job loses ranks, the optimizer's rate is rescaled to the number of remaining
    ranks. If the optimizer uses a learning rate schedule, the rates of the schedule are rescaled
    too.

    Args:
        rate: The learning rate for one process.

    Returns:
        The learning rate for this job.
    """
    global _program_scales
    _program_scales = True
    return rate * world.settings().gradients_in_update(world.size())


def prepare_rescaling(optimizer: Any) -> None:
    """Make it possible to rescale the rates that a schedule or a function computes.

    Each computed rate is multiplied by a variable, which is 1 at first. This must be called before
    the step is traced. The schedule itself and the saved optimizer don't change.
    """
    for plain in plain_optimizers(optimizer) if _program_scales else ():
        if not isinstance(learning_rate_of(plain), keras.Variable) and not hasattr(plain, _FACTOR):
            rate = getattr(plain, RATE)
            factor = keras.Variable(1.0, dtype="float32", trainable=False, name="rate_factor")
            set_untracked(plain, _FACTOR, factor)
            set_untracked(plain, RATE, partial(_multiplied, rate, factor))


def has_rate_factor(optimizer: Any) -> bool:
    """Return whether ``prepare_rescaling`` has changed how rates are computed."""
    return any(hasattr(plain, _FACTOR) for plain in plain_optimizers(optimizer))


def _multiplied(rate: Callable[[], Any], factor: Any) -> Any:
    return keras.ops.multiply(rate(), factor)


def rescale_rate(optimizer: Any, before: int, now: int) -> None:
    """Adapt a rate that ``scale_learning_rate`` has scaled to another number of ranks."""
    rescale_restored_rate(optimizer, before, now)
    for plain in plain_optimizers(optimizer) if _program_scales else ():
        factor = getattr(plain, _FACTOR, None)
        if factor is not None:
            factor.assign(factor * (now / before))


def rescale_restored_rate(optimizer: Any, before: int, now: int) -> None:
    """Scale a learning rate that was restored from a checkpoint of a job with ``before`` ranks.

    Checkpoints contain only rates that are plain numbers. Rates of a schedule or function are
    computed for the current ranks, so they need no scaling.
    """
    for plain in plain_optimizers(optimizer) if _program_scales else ():
        rate = learning_rate_of(plain)
        if isinstance(rate, keras.Variable):
            rate.assign(rate * (now / before))


class WarmUp(keras.callbacks.Callback):
    """Raises the learning rate linearly over the first epochs.

    With N ranks, each step trains on N times as many samples, and the learning rate is usually
    multiplied by N. Training may diverge if it starts with that rate. Goyal et al. (2017),
    "Accurate, Large Minibatch SGD", section 2.2, start with the rate of one process, and raise it
    linearly within five epochs.

    Example::

        model.compile(optimizer=keras.optimizers.SGD(hvdtrain.scale_learning_rate(0.01)), ...)
        model.fit(..., callbacks=[hvdtrain.WarmUp(initial=0.01, epochs=5)])

    Args:
        initial: The learning rate at the beginning.
        epochs: The number of epochs after which the optimizer's own rate is reached. It must be
            above 0, and may be a fraction.
        steps_per_epoch: The number of steps in an epoch. Only used if the length of the data is
            unknown.

    Raises:
        ModelError: If an argument is invalid. Also raised when training begins, if the optimizer
            uses a schedule, or if the number of steps in an epoch is unknown.
    """

    def __init__(
        self, *, initial: float, epochs: float = 5, steps_per_epoch: int | None = None
    ) -> None:
        super().__init__()
        if not epochs > 0 or not initial >= 0:
            raise ModelError(
                "WarmUp takes epochs above 0 and an initial rate of at least 0, got "
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
        """Read the optimizer's learning rate."""
        optimizers = optimizers_of(self.model)
        if len(optimizers) != 1:
            raise ModelError(
                f"WarmUp sets the rate of one optimizer, but this model has {len(optimizers)}. Set "
                "their rates in a custom callback."
            )
        (optimizer,) = optimizers
        plain = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(learning_rate_of(plain), keras.optimizers.schedules.LearningRateSchedule):
            raise ModelError(
                "WarmUp sets the learning rate itself, but this optimizer uses a schedule. Use a "
                "schedule with a warmup, such as keras.optimizers.schedules.CosineDecay, or a "
                "plain number."
            )
        if self._steps() is None:
            raise ModelError(
                "WarmUp raises the rate in each step of an epoch, but the length of this data is "
                "unknown; pass steps_per_epoch to WarmUp, or to fit with data that repeats."
            )
        self._target = float(keras.ops.convert_to_tensor(optimizer.learning_rate))

    def on_ranks_lost(self, change: Change) -> None:
        """Rescale the rate that the warmup reaches, if the program uses ``scale_learning_rate``."""
        if _program_scales:
            self._target *= len(change.now) / len(change.before)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of the next step."""
        steps = self._steps() or 1
        done = (self._epoch + min(batch / steps, 1.0)) / self._epochs
        if done < 1 + 1 / steps:
            rate = self._initial + min(done, 1.0) * (self._target - self._initial)
            optimizers_of(self.model)[0].learning_rate = rate

    def _steps(self) -> int | None:
        return (self.params or {}).get("steps") or self._given_steps
