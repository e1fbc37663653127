"""The exchange of a worker with the servers: it pushes gradients and receives weights.

It replaces the update of a Keras optimizer, after gradient accumulation. The servers' optimizers
clip, decay and update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ModelError, NonFiniteError
from hvdtrain.gradients.non_finite import name_non_finite
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.loss_weights import IndependentLossWeights
from hvdtrain.keras.optimizer_patch import (
    WeightedStepsMixin,
    accumulates,
    mix_in,
    mix_in_weighted_steps,
    plain_optimizers,
)
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.gradients import Gradient, Rows
from hvdtrain.parameter_server.protocol import NO_POSITION
from hvdtrain.private_api.keras import learning_rate_of

__all__ = ["GradientExchange", "WorkerLossWeights", "refuse_training"]


class WorkerLossWeights(IndependentLossWeights):
    """Weighs losses of a worker; ``gathers`` is whether servers sum gradients of several."""

    def __init__(self, reducer: GradientReducer, *, gathers: bool) -> None:
        super().__init__(reducer)
        self._gathers = gathers

    def weight(self, rows: tf.Tensor, joint_rows: tf.Tensor, sums: bool) -> tf.Tensor:
        if sums and self._gathers:
            raise ModelError(
                "Losses with reduction='sum' can't be put together by parameter servers that make "
                "a step of several workers' gradients. Use reduction='sum_over_batch_size', "
                "--mode async-ps without --staleness-bound 0, or --mode allreduce."
            )
        return super().weight(rows, joint_rows, sums)


class _LeavesUpdates(WeightedStepsMixin):
    """A mixin: a plain optimizer leaves updates and averages to the servers.

    It is saved as the plain class.
    """

    _hvdtrain_reducer: GradientExchange

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        pass

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        pass

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        settable = isinstance(learning_rate_of(self), keras.Variable)
        weight, grads = self._hvdtrain_take_mean(grads)
        self._hvdtrain_reducer.step(
            grads,
            trainable_variables,
            weight=weight,
            learning_rate=learning_rate if settable else None,
        )


class _CountsOverflows:
    """A mixin of ``LossScaleOptimizer``: reports steps with an overflow to the servers."""

    _hvdtrain_reducer: GradientExchange

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        tf.cond(finite, lambda: None, self._hvdtrain_reducer.skip_step)
        return finite


class GradientExchange:
    """Replaces the optimizer's update on a worker.

    With ``overlap`` the worker computes while gradients are in flight, with the weights that came
    for the gradients before. Between epochs, and before validations and checkpoints, nothing is in
    flight.
    """

    def __init__(self, job: ServedJob) -> None:
        self._variables = list(job.model.trainable_variables)
        self._places = {id(variable): n for n, variable in enumerate(self._variables)}
        self._reducer = job.reducer
        self._steps = job.steps
        self._require_finite = job.settings.non_finite == "error"
        self._is_chief = job.is_chief
        self._accumulates = accumulates(job.model.optimizer)
        self._overlaps = job.settings.overlap
        self._epoch_begins = False
        state = job.shards.state
        # Only the chief shows averages of the weights.
        self._averages = state if job.is_chief and state.has_averages else None
        self.client: Client | None = None
        """The connection to the servers, within ``fit``."""
        self.position: Callable[[int, int], tuple[int, ...]] | None = None
        """Returns this worker's position in its data, given the counts of ``ModelSteps``."""

    def attach(self, optimizer: Any) -> None:
        """Let ``optimizer`` exchange with the servers; saving and loading it is unchanged."""
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            mix_in(optimizer, _CountsOverflows, self)
        for leaf in plain_optimizers(optimizer):
            mix_in_weighted_steps(leaf, _LeavesUpdates, self)

    @contextmanager
    def using(self, client: Client) -> Iterator[None]:
        """Train through ``client`` within the block."""
        self.client = client
        try:
            yield
        finally:
            self.client = self.position = None

    def reach(self) -> Client:
        """Return the connection to the servers.

        Raises:
            ModelError: The model trains outside of ``fit``.
        """
        if self.client is None:
            refuse_training()
        return self.client

    def pull(self) -> None:
        """Fetch the newest weights."""
        self.assign(self.reach().pull())

    def assign(self, weights: Sequence[np.ndarray]) -> None:
        """Give the model other weights, of all trainable variables."""
        for variable, value in zip(self._variables, weights):
            variable.assign(value)

    def begin_epoch(self) -> None:
        """Prepare the first step of an epoch."""
        # After a validation the weights of the last step are outdated.
        self.pull()
        self._epoch_begins = True

    def begin_step(self) -> None:
        """Prepare a step, or a block of steps."""
        if self._epoch_begins and self._averages is not None:
            # Callbacks may have swapped the weights for their averages, and back.
            self.pull()
        self._epoch_begins = False

    def show_newest(self) -> None:
        """Give the model the servers' newest weights for validation."""
        if self._averages is not None:
            self.assign(self._averages.newest_weights(self.reach()))
        elif self.reach().has_newer_weights:
            self.pull()

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
            gradients: A tensor or ``IndexedSlices`` for each of ``variables``.
            variables: Keras variables.
            weight: The weight of the gradients next to those of other workers; 0 sends none.
            learning_rate: The optimizer's; None if it follows a schedule.
            ends: Whether this completes all steps until now.
        """
        places = [self._places[id(variable)] for variable in variables]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        flat: list[Any] = []
        for gradient, rows in zip(gradients, sparse):
            flat += [gradient.indices, gradient.values] if rows else [gradient]
        sets_rate = self._is_chief and learning_rate is not None
        rate = (
            tf.cast(learning_rate, tf.float64) if sets_rate else tf.constant(math.nan, tf.float64)
        )
        counts = tf.constant(1.0, tf.float64) if weight is None else weight
        types = [tf.as_dtype(variable.dtype) for variable in self._variables]
        nothing = [np.empty(0, dtype.as_numpy_dtype) for dtype in types]

        def push(
            ran: np.ndarray,
            samples: np.ndarray,
            rate: np.ndarray,
            counts: np.ndarray,
            *arrays: np.ndarray,
        ) -> list[np.ndarray]:
            with self._reducer.remember_error():
                found = None
                if float(counts) > 0:
                    found = _gradients(len(self._variables), places, sparse, arrays)
                    self._check_finite(found)
                position = NO_POSITION
                if ends and self.position is not None:
                    position = self.position(int(ran), int(samples))
                weights = self.reach().push(
                    found,
                    weight=float(counts),
                    learning_rate=float(rate),
                    position=position,
                    overlap=self._overlaps,
                )
                return [np.array(weights is not None), *(weights or nothing)]

        def assign() -> None:
            for variable, value in zip(self._variables, weights):
                value.set_shape(variable.shape)
                variable.assign(value)

        progress = [tf.identity(v.value) for v in (self._steps.ran, self._steps.samples)]
        came, *weights = tf.numpy_function(
            push, [*progress, rate, counts, *flat], [tf.bool, *types]
        )
        came.set_shape([])
        tf.cond(came, assign, lambda: None)

    def skip_step(self) -> None:
        """Report to the servers that this step has no gradients."""
        nothing = tf.constant(0.0, tf.float64)
        # Accumulated gradients of earlier steps may still wait for their update.
        self.step([], [], weight=nothing, learning_rate=None, ends=not self._accumulates)

    def _check_finite(self, gradients: Sequence[Gradient]) -> None:
        """Raise NonFiniteError if a gradient holds NaN or infinity."""
        if not self._require_finite:
            return
        names = [v.path for v, entry in zip(self._variables, gradients) if entry is not None]
        values = [e.values if isinstance(e, Rows) else e for e in gradients if e is not None]
        if bad := name_non_finite(names, values):
            raise NonFiniteError(
                f"A gradient is not finite: {', '.join(bad[:5])}. It was not sent to the parameter "
                "servers. Lower the learning rate, clip gradients or look at the data of this "
                "rank; HVDTRAIN_NON_FINITE=ignore lets such values through."
            )


def refuse_training() -> NoReturn:
    """Raise ModelError: the model trains outside of ``fit``."""
    raise ModelError(
        "With parameter servers a model trains in fit alone: there is nobody to take the gradients "
        "of train_on_batch, or of a training loop of your own. Call model.fit, or leave --mode out."
    )


def _gradients(
    count: int, places: Sequence[int], sparse: Sequence[bool], arrays: Sequence[np.ndarray]
) -> list[Gradient]:
    """Return the gradients of all variables, None for those that have none."""
    found: list[Gradient] = [None] * count
    left = iter(arrays)
    for place, is_sparse in zip(places, sparse):
        first = next(left)
        found[place] = Rows(first.astype(np.int64, copy=False), next(left)) if is_sparse else first
    return found
