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

from hvdtrain.keras.optimizer_patch import accumulates, mix_in
from hvdtrain.keras.own_updates import WeighsSteps
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.keras.served.worker_exchange import AveragesElsewhere, WorkerExchange
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.gradients import Gradient, GradientSum, Rows
from hvdtrain.parameter_server.protocol import NO_POSITION
from hvdtrain.private_api.keras import rate_of

__all__ = ["GradientExchange"]

# From inputs to the gradients that are sent, None for none that count, and what they count for.
Take = Callable[..., tuple[list[Gradient] | None, float]]


class _LeavesUpdates(AveragesElsewhere, WeighsSteps):
    """A mixin: a plain optimizer leaves updates to the servers; saved as the plain class."""

    _hvdtrain_reducer: GradientExchange

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        settable = isinstance(rate_of(self), keras.Variable)
        weight, grads = self._hvdtrain_take_mean(grads)
        self._hvdtrain_reducer.step(
            grads,
            trainable_variables,
            weight=weight,
            learning_rate=learning_rate if settable else None,
        )


class _CountsOverflows:
    """A mixin of ``LossScaleOptimizer``: tells servers of a step whose gradients overflowed."""

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
    checkpoints, nothing is under way.
    """

    mixin = _LeavesUpdates

    def __init__(self, job: ServedJob) -> None:
        super().__init__(job)
        self._places = {id(variable): n for n, variable in enumerate(self._variables)}
        self._accumulates = accumulates(job.model.optimizer)
        self._push_every = job.settings.push_every
        self._overlaps = job.settings.overlap
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
        position = self._position_after(self._steps.ran.numpy(), self._steps.samples.numpy())
        return self.reach().push(
            self._accrued.take() or None, weight=1.0, learning_rate=math.nan, position=position
        )

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
            gradients: Tensors or ``IndexedSlices``, of ``variables`` each.
            variables: Keras variables.
            weight: How much they count beside those of other workers; 0 for nothing.
            learning_rate: The optimizer's; None where it follows a schedule.
            ends: Whether with them all steps until now are done.
        """
        places = [self._places[id(variable)] for variable in variables]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        flat: list[Any] = []
        for gradient, rows in zip(gradients, sparse):
            flat += [gradient.indices, gradient.values] if rows else [gradient]
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
                lambda: self._push(lambda: (self._accrued.take() or None, 1.0), ends, rate, []),
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
        """Send what ``take`` makes of the inputs, as ``step`` says."""

        def exchange(
            client: Client, position: tuple[int, ...], rate: np.ndarray, *arrays: np.ndarray
        ) -> list[np.ndarray] | None:
            gradients, weight = take(*arrays)
            return client.push(
                gradients,
                weight=weight,
                learning_rate=float(rate),
                position=position if ends else NO_POSITION,
                ahead=self._overlaps,
            )

        self._run(exchange, [rate, *inputs])

    def _accrue(self, take: Take, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Keep gradients; returns whether it is time to send, and the servers' learning rate."""

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
    """Take a step of plain gradient descent."""
    for gradient, variable in zip(gradients, variables):
        change = tf.math.scalar_mul(tf.cast(rate, gradient.dtype), gradient)
        if isinstance(change, tf.IndexedSlices):
            variable.value.scatter_sub(change)
        else:
            variable.assign_sub(change)


def _gradients(
    count: int, places: Sequence[int], sparse: Sequence[bool], arrays: Sequence[np.ndarray]
) -> list[Gradient]:
    """Returns the gradients of all variables, None for those that have none."""
    found: list[Gradient] = [None] * count
    left = iter(arrays)
    for place, is_sparse in zip(places, sparse):
        first = next(left)
        found[place] = Rows(first.astype(np.int64, copy=False), next(left)) if is_sparse else first
    return found
