"""Horovod's callbacks for ``fit``.

Models that are passed to ``hvdtrain.distribute`` don't need these callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.compat.horovod.broadcast import broadcast_variables
from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import learning_rate_of
from hvdtrain.trainer.optimizer_patch import plain_optimizers

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Callback that broadcasts the variables of the model and the optimizer from one rank.

    The broadcast happens when training begins. If the model is not built yet, it happens after the
    first step.

    Args:
        root_rank: Rank whose values are assigned on every rank.
        device: Ignored.
        local_variables: A variable, or a sequence of variables, to exclude from the broadcast.

    Raises:
        ValueError: If ``local_variables`` contains something other than variables.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local: list[Any] = []
        if local_variables is None:
            local_variables = []
        for variable in (
            local_variables if isinstance(local_variables, Sequence) else [local_variables]
        ):
            if not hasattr(variable, "assign"):
                raise ValueError(
                    f"local_variables must be variables, got {type(variable).__name__}."
                )
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast, so that each rank keeps its own value."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables if the model and the optimizer are built."""
        if self.model.built and self.model.optimizer.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast the variables after the first step if they didn't exist when training began."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        local = {id(variable) for variable in self._local}
        variables = [*self.model.variables, *self.model.optimizer.variables]
        broadcast_variables([v for v in variables if id(v) not in local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Callback that averages the results of an epoch over all ranks.

    Callbacks that come later in the list see the averages. All ranks have the same weight, even if
    they have different numbers of samples. ``hvdtrain.distribute``, in contrast, computes exact
    results over all samples.

    Args:
        device: Ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the results in ``logs`` with their averages over all ranks."""
        if not logs:
            return
        names = sorted(logs)
        values = np.array([float(logs[name]) for name in names])
        means = world.collectives().allreduce(values, "average", name=", ".join(names))
        logs.update(zip(names, means.tolist()))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Callback that sets the learning rate to ``initial_lr`` times a multiplier.

    Args:
        initial_lr: Learning rate to multiply.
        multiplier: A number, or a function that takes the epoch and returns the factor. If it is a
            number, the factor is ``multiplier ** (epoch - start_epoch)``.
        start_epoch: First epoch whose learning rate is set.
        end_epoch: Epoch at which the callback stops setting the learning rate. By default, it never
            stops.
        staircase: Whether to set the learning rate once per epoch. Otherwise it is set before each
            step, and ``multiplier`` gets fractional epochs.
        momentum_correction: Ignored, because momentum is constant in Keras 3.
        steps_per_epoch: Number of steps per epoch, used if ``staircase`` is False. Defaults to the
            number of steps per epoch of ``fit``.

    Raises:
        ValueError: If ``initial_lr`` is None.
        ModelError: In ``fit``, if the optimizer has a learning rate schedule, or if the number of
            steps per epoch is unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be a number, got None.")
        self.initial_lr = initial_lr
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the optimizer's learning rate can be set."""
        for plain in plain_optimizers(self.model.optimizer):
            if not isinstance(learning_rate_of(plain), keras.Variable):
                raise ModelError(
                    f"{type(self).__name__} can't set the learning rate of an optimizer with a "
                    "schedule; pass the optimizer a number, or leave the callback out."
                )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ModelError(
                    f"{type(self).__name__} does not know the number of steps per epoch; pass "
                    "steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate."""
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or ended or (self.staircase and batch > 0):
            return
        fraction = 0.0 if self.staircase else batch / float(self.steps_per_epoch or 1)
        rate = self.initial_lr * self.multiplier(self._epoch + fraction)
        for plain in plain_optimizers(self.model.optimizer):
            plain.learning_rate = rate

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the results of the epoch."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        (first, *_) = plain_optimizers(self.model.optimizer)
        return float(keras.ops.convert_to_tensor(first.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that raises the learning rate from ``initial_lr / size()`` to ``initial_lr``.

    The learning rate is ``initial_lr / n * (epoch * (n - 1) / e + 1)`` with n ranks and e warmup
    epochs. ``epoch`` may be fractional. See Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    section 2.2.

    Args:
        initial_lr: Learning rate after the warmup, which is usually scaled by the number of ranks.
        warmup_epochs: Number of warmup epochs.
        momentum_correction: Ignored.
        steps_per_epoch: Number of steps per epoch. Defaults to the number of steps per epoch of
            ``fit``.
        verbose: 1 to print a message when the warmup ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # As in Horovod, add one step, so that the last step of an epoch completes the epoch.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            ranks = world.size()
            return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the results of the epoch. Print it when the warmup ends."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and world.is_chief():
            rate = self._rate()
            print(
                f"Epoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.", flush=True
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A ``keras.callbacks.ModelCheckpoint`` with ``save_best_only=True``.

    Args:
        filepath: Path of the file.
        options: Other arguments of ``keras.callbacks.ModelCheckpoint``.
    """

    def __init__(self, filepath: Any, **options: Any) -> None:
        super().__init__(filepath, **{**options, "save_best_only": True})
