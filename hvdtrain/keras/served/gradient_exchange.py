"""A worker's gradients go to the servers where a Keras optimizer would clip and apply them.

That is after gradient accumulation; the servers' optimizers clip, decay and update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config import Settings
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.optimizer_patch import accumulates, mix_in
from hvdtrain.keras.served.server_shards import ServerShards
from hvdtrain.keras.served.worker_exchange import WeighsSteps, WorkerExchange
from hvdtrain.parameter_server.gradients import Gradient, GradientSum, Rows
from hvdtrain.parameter_server.protocol import NO_POSITION

__all__ = ["GradientExchange"]

# From inputs to the gradients that are sent, None for none that count, and what they count for.
Take = Callable[..., tuple[list[Gradient] | None, float]]


class _LeavesUpdates(WeighsSteps):
    """Mixed into the class of a plain optimizer; saved as the plain class."""

    _hvdtrain_reducer: GradientExchange

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        settable = isinstance(self._learning_rate, keras.Variable)  # type: ignore[attr-defined]
        weight, grads = self._hvdtrain_take_mean(grads)
        self._hvdtrain_reducer.step(
            grads,
            trainable_variables,
            weight=weight,
            learning_rate=learning_rate if settable else None,
        )


class _CountsOverflows:
    """Mixed into ``LossScaleOptimizer``: servers are told of a step whose gradients overflowed."""

    _hvdtrain_reducer: GradientExchange

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        tf.cond(finite, lambda: None, self._hvdtrain_reducer.skip_step)
        return finite


class GradientExchange(WorkerExchange):
    """Takes the place of the optimizer's update on a worker.

    With ``push_every`` it sends the sum of the gradients of so many steps. In those between, the
    model takes a step of plain gradient descent by itself, as in Downpour (Dean et al. 2012, "Large
    Scale Distributed Deep Networks"). With ``overlap`` it goes on while gradients are under way,
    with the weights that came for those before; between epochs, and before validations and
    checkpoints, nothing is under way. It takes the same arguments as ``WorkerExchange``.
    """

    mixin = _LeavesUpdates

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        steps: ModelSteps,
        settings: Settings,
        shards: ServerShards,
        *,
        is_chief: bool,
    ) -> None:
        super().__init__(model, reducer, steps, settings, shards, is_chief=is_chief)
        self._places = {id(variable): n for n, variable in enumerate(self._variables)}
        self._accumulates = accumulates(model.optimizer)
        self._push_every = settings.push_every
        self._overlaps = settings.overlap
        self._accrued = GradientSum()
        self._epoch_begins = False

    def attach(self, optimizer: Any) -> None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            mix_in(optimizer, _CountsOverflows, self)
        super().attach(optimizer)

    def begin_epoch(self) -> None:
        # The weights of the last step are old when a validation has been between.
        self.pull()
        self._epoch_begins = True

    def go_on(self) -> None:
        if self._epoch_begins and self._averages is not None:
            # Callbacks that put averages in the place of weights have taken them out since.
            self.pull()
        self._epoch_begins = False

    def pull(self) -> None:
        """Take the newest weights, after the last gradients have been sent."""
        self.assign(self.send_rest() or self.reach().pull())

    def show_newest(self) -> None:
        if self._averages is not None:
            self.send_rest()
            self.assign(self._averages.newest_weights(self.reach()))
        elif self.reach().is_ahead:
            self.pull()

    def send_rest(self) -> list[np.ndarray] | None:
        """Send what waits for gradients of more steps; returns weights if there was any."""
        if not self._accrued.steps:
            return None
        ran, samples = (counted.numpy() for counted in self._counted())
        gradients, position = self._accrued.take(), self._position(ran, samples)
        return self.reach().push(gradients, weight=1.0, learning_rate=math.nan, position=position)

    def _forget(self) -> None:
        self._accrued = GradientSum()

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        weight: tf.Tensor | None,
        learning_rate: Any,
        ends: bool = True,
    ) -> None:
        """Send gradients of some variables, and take the weights of all.

        Args:
            gradients: Tensors or ``IndexedSlices``.
            variables: The variable of each.
            weight: How much they count beside those of other workers; 0 for nothing.
            learning_rate: The optimizer's; None where it follows a schedule.
            ends: Whether with them all steps until now are done.
        """
        places = [self._places[id(variable)] for variable in variables]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        flat: list[Any] = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                flat += [gradient.indices, gradient.values]
            else:
                flat.append(gradient)
        tells = self._is_chief and learning_rate is not None
        rate = tf.cast(learning_rate, tf.float64) if tells else tf.constant(math.nan, tf.float64)
        counts = tf.constant(1.0, tf.float64) if weight is None else weight

        def take(counts: np.ndarray, *arrays: np.ndarray) -> tuple[list[Gradient] | None, float]:
            found = _gradients(len(self._variables), places, sparse, arrays)
            if float(counts) <= 0:
                return None, float(counts)
            self._check_finite(found, "A gradient")
            return found, float(counts)

        if self._push_every == 1:
            self._push(take, ends, rate, [counts, *flat])
        else:
            complete, servers_rate = self._accrue(take, [counts, *flat])
            rate_now = rate if tells else servers_rate
            tf.cond(
                complete,
                lambda: self._push(lambda: (self._accrued.take(), 1.0), ends, rate, []),
                lambda: tf.cond(
                    counts > 0, lambda: _descend(gradients, variables, rate_now), lambda: None
                ),
            )

    def skip_step(self) -> None:
        """Tell the servers that this step has no gradients."""
        nothing = tf.constant(0.0, tf.float64)
        # Gradients of earlier steps may wait here: those are not done yet.
        self.step([], [], weight=nothing, learning_rate=None, ends=not self._accumulates)

    def _push(self, take: Take, ends: bool, rate: Any, inputs: Sequence[Any]) -> None:
        """Exchange with the servers.

        Args:
            take: From ``inputs`` to gradients and what they count for.
            ends: Whether with them all steps until now are done.
            rate: The learning rate.
            inputs: Tensors, which ``take`` gets as arrays.
        """

        def run(
            ran: np.ndarray, samples: np.ndarray, rate: np.ndarray, *arrays: np.ndarray
        ) -> list[np.ndarray] | None:
            with self._reducer.remember_error():
                client = self.reach()
                gradients, weight = take(*arrays)
                position = self._position(ran, samples) if ends else NO_POSITION
                return client.push(
                    gradients,
                    weight=weight,
                    learning_rate=float(rate),
                    position=position,
                    ahead=self._overlaps,
                )

        exchange = self._run_if_any if self._overlaps else self._run
        exchange(run, [*self._counted(), rate, *inputs])

    def _accrue(self, take: Take, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Keep gradients for later; whether it is time to send, and the servers' learning rate."""

        def run(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            with self._reducer.remember_error():
                self._accrued.add(take(*arrays)[0])
                rate = self.reach().learning_rate
                return np.array(self._accrued.steps >= self._push_every), np.array(rate, np.float64)

        complete, rate = tf.numpy_function(run, inputs, [tf.bool, tf.float64])
        complete.set_shape([])
        rate.set_shape([])
        return complete, rate


def _descend(gradients: Sequence[Any], variables: Sequence[Any], rate: tf.Tensor) -> None:
    """A step of plain gradient descent."""
    for gradient, variable in zip(gradients, variables):
        change = tf.math.scalar_mul(tf.cast(rate, gradient.dtype), gradient)
        if isinstance(change, tf.IndexedSlices):
            variable.value.scatter_sub(change)
        else:
            variable.assign_sub(change)


def _gradients(
    count: int, places: Sequence[int], sparse: Sequence[bool], arrays: Sequence[np.ndarray]
) -> list[Gradient]:
    """The gradients of all variables, None for those that have none."""
    found: list[Gradient] = [None] * count
    left = iter(arrays)
    for place, is_sparse in zip(places, sparse):
        first = next(left)
        found[place] = Rows(first.astype(np.int64, copy=False), next(left)) if is_sparse else first
    return found
