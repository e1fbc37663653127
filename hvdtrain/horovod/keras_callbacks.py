"""Horovod's callbacks, for ``fit`` of models whose ranks each train on data of their own.

A model that ``hvdtrain.distribute`` has seen needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.horovod.broadcast import broadcast_variables
from hvdtrain.keras.optimizer_patch import plain_optimizers
from hvdtrain.private_api.keras import rate_of

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Lets all ranks begin with the weights and the optimizer's state of one.

    That is when training begins, or after its first step where there are no weights before.

    Args:
        root_rank: The rank whose they are.
        device: Has no effect.
        local_variables: One or more that each rank keeps for itself.

    Raises:
        ValueError: ``local_variables`` are no variables.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local: list[Any] = []
        given = local_variables if isinstance(local_variables, Sequence) else [local_variables]
        for variable in () if local_variables is None else given:
            if not hasattr(variable, "assign"):
                raise ValueError(
                    f"Received {type(variable).__name__} among local_variables; expected variables."
                )
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep a variable for itself."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.built and self.model.optimizer.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        local = {id(variable) for variable in self._local}
        everything = [*self.model.variables, *self.model.optimizer.variables]
        broadcast_variables([v for v in everything if id(v) not in local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Makes the results of an epoch means over all ranks, for the callbacks after it.

    Each rank counts as much as any other, however many samples it has; ``hvdtrain.distribute``
    makes results those of all samples.

    Args:
        device: Has no effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = np.array([float(logs[name]) for name in names])
        means = world.collectives().allreduce(values, "average", name=", ".join(names))
        logs.update(zip(names, means.tolist()))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the learning rate, from some epoch to another.

    Args:
        initial_lr: What is multiplied.
        multiplier: A function of the epoch; or a number that is raised to the power of epochs
            since ``start_epoch``.
        start_epoch: The first epoch of which the rate is set.
        end_epoch: The first of which it no longer is; None for none.
        staircase: Set it once an epoch; otherwise before each step, for parts of epochs.
        momentum_correction: Has no effect: momentum is a constant of Keras 3's optimizers.
        steps_per_epoch: For steps within an epoch; found out if not given.

    Raises:
        ValueError: ``initial_lr`` is None.
        ModelError: When training begins, if the optimizer follows a schedule of its own, or
            nobody knows how many steps an epoch has.
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
            raise ValueError("Received initial_lr=None; expected the learning rate to multiply.")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else self._power_of(multiplier)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        for plain in plain_optimizers(self.model.optimizer):
            if not isinstance(rate_of(plain), keras.Variable):
                raise ModelError(
                    f"{type(self).__name__} sets the learning rate, and the optimizer computes its "
                    "own. Pass the optimizer a plain number, or leave the callback out."
                )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ModelError(
                    f"{type(self).__name__} can't tell how many steps an epoch has; pass "
                    "steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        late = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or late:
            return
        if self.staircase:
            if batch == 0:
                self._set_rate(self._epoch)
        else:
            self._set_rate(self._epoch + batch / float(self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _power_of(self, factor: float) -> Callable[[float], float]:
        return lambda epoch: factor ** (epoch - self.start_epoch)

    def _set_rate(self, epoch: float) -> None:
        rate = self.initial_lr * self.multiplier(epoch)
        for plain in plain_optimizers(self.model.optimizer):
            plain.learning_rate = rate

    def _rate(self) -> float:
        (first, *_) = plain_optimizers(self.model.optimizer)
        return float(keras.ops.convert_to_tensor(first.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to ``initial_lr`` over the first epochs.

    Goyal et al. (2017), "Accurate, Large Minibatch SGD", section 2.2. With n ranks and e epochs,
    the rate is ``initial_lr / n * (epoch * (n - 1) / e + 1)``, where epoch counts in steps.

    Args:
        initial_lr: The rate to reach, usually that of one rank times the number of ranks.
        warmup_epochs: In how many epochs.
        momentum_correction: As for ``LearningRateScheduleCallback``.
        steps_per_epoch: As for ``LearningRateScheduleCallback``.
        verbose: 1 to say when the rate is reached.
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
            # The last step of an epoch has a round number, as Horovod has it.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            ranks = world.size()
            return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and world.is_chief():
            print(
                f"Epoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.",
                flush=True,
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """``keras.callbacks.ModelCheckpoint`` that keeps the best model.

    Args:
        filepath: Where it is kept.
        options: Other arguments of ``keras.callbacks.ModelCheckpoint``.
    """

    def __init__(self, filepath: Any, **options: Any) -> None:
        super().__init__(filepath, **{**options, "save_best_only": True})
