"""The exchange of gradients and weights with parameter servers.

On a worker, this exchange replaces the update of a Keras optimizer. It follows after gradient
accumulation. The servers' copies of the optimizer then clip the gradients, apply weight decay, and
update the weights.
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
from hvdtrain.gradients.gradient_checks import name_non_finite
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.gradients import Gradient, Rows
from hvdtrain.parameter_server.protocol import NO_POSITION
from hvdtrain.private_api.keras import learning_rate_of
from hvdtrain.trainer.backends.tensorflow.independent_ranks import (
    IndependentLossWeights,
    WeightedStepsMixin,
    mix_in_weighted_steps,
)
from hvdtrain.trainer.optimizer_patch import (
    accumulates,
    mix_in,
    plain_optimizers,
)
from hvdtrain.trainer.served.served_fit import ServedJob

__all__ = ["GradientExchange", "WorkerLossWeights", "refuse_training"]


class WorkerLossWeights(IndependentLossWeights):
    """The weights of a worker's loss. Servers average gradients of workers if ``gathers``."""

    def __init__(self, reducer: GradientReducer, *, gathers: bool) -> None:
        super().__init__(reducer)
        self._gathers = gathers

    def weight(self, rows: tf.Tensor, joint_rows: tf.Tensor, sums: bool) -> tf.Tensor:
        """Return the weight of this worker's loss.

        Raises:
            ModelError: If the losses are sums, and the servers average gradients.
        """
        if sums and self._gathers:
            raise ModelError(
                "Losses with reduction='sum' are not supported if parameter servers average the "
                "gradients of workers. Use reduction='sum_over_batch_size', --mode async-ps "
                "without --staleness-bound 0, or --mode allreduce."
            )
        return super().weight(rows, joint_rows, sums)


class _ServedOptimizerMixin(WeightedStepsMixin):
    """Mixin that sends a worker's gradients to servers. The optimizer is saved without it."""

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


class _OverflowMixin:
    """Mixin for a worker's ``LossScaleOptimizer``, which reports overflows as empty steps."""

    _hvdtrain_reducer: GradientExchange

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        tf.cond(finite, lambda: None, self._hvdtrain_reducer.skip_step)
        return finite


class GradientExchange:
    """Sends a worker's gradients to the servers, and assigns the weights that they send back.

    With ``--overlap`` the worker computes the next step while the gradients of a step are sent. The
    weights of the next step don't include the update with these gradients yet. Between epochs,
    during validations and during checkpoints, no gradients are on their way.
    """

    def __init__(self, job: ServedJob) -> None:
        # function that returns this worker's position in its data, given ``ModelSteps.ran`` and
        # ``ModelSteps.samples``
        self.position: Callable[[int, int], tuple[int, ...]] | None = None
        self._client: Client | None = None
        self._variables = list(job.model.trainable_variables)
        self._numbers = {id(variable): n for n, variable in enumerate(self._variables)}
        self._job = job
        self._accumulates = accumulates(job.model.optimizer)
        self._epoch_begins = False
        # Only the chief validates and saves.
        self._has_averages = job.is_chief and job.has_averages

    def attach(self, optimizer: Any) -> None:
        """Make ``optimizer`` use the servers for its updates. It is saved and loaded as before."""
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            mix_in(optimizer, _OverflowMixin, self)
        for leaf in plain_optimizers(optimizer):
            mix_in_weighted_steps(leaf, _ServedOptimizerMixin, self)

    @contextmanager
    def connected(self, client: Client) -> Iterator[None]:
        """Use the connection ``client`` for training within the ``with`` block."""
        self._client = client
        try:
            yield
        finally:
            self._client = self.position = None

    @property
    def in_fit(self) -> bool:
        """Whether this worker is connected to the servers."""
        return self._client is not None

    @property
    def client(self) -> Client:
        """The connection to the servers. Raises ModelError outside of ``fit``."""
        if self._client is None:
            refuse_training()
        return self._client

    def pull(self) -> None:
        """Request the newest weights from the servers, and assign them to the model."""
        self.assign(self.client.pull())

    def assign(self, weights: Sequence[np.ndarray]) -> None:
        """Assign arrays to all trainable variables of the model."""
        for variable, value in zip(self._variables, weights):
            variable.assign(value)

    def begin_epoch(self) -> None:
        """Load the newest weights before the first step of an epoch."""
        # After a validation the weights of the last step are outdated.
        self.pull()
        self._epoch_begins = True

    def begin_step(self) -> None:
        """Prepare a step, or a block of steps."""
        if self._epoch_begins and self._has_averages:
            # Callbacks may have swapped the weights and their averages.
            self.pull()
        self._epoch_begins = False

    def load_newest(self) -> None:
        """Set the model's weights and their moving averages to the servers' newest values."""
        if self._has_averages:
            averages = self._job.pack_state(averages_only=True)
            self.assign(self.client.averages(averages))
            self._job.load_state(averages, averages_only=True)
        elif self.client.has_newer_weights:
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
        """Send gradients to the servers, and assign the weights that the servers send back.

        Args:
            gradients: A tensor or ``IndexedSlices`` for each of ``variables``.
            variables: Keras variables.
            weight: The weight of the gradients relative to other workers' gradients. If it is 0, no
                gradients are sent.
            learning_rate: The optimizer's learning rate. None if the optimizer uses a schedule.
            ends: True if no accumulated gradients remain on this worker after this call.
        """
        numbers = [self._numbers[id(variable)] for variable in variables]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        flat: list[Any] = []
        for gradient, is_sparse in zip(gradients, sparse):
            flat += [gradient.indices, gradient.values] if is_sparse else [gradient]
        sets_rate = self._job.is_chief and learning_rate is not None
        rate = tf.cast(learning_rate if sets_rate else math.nan, tf.float64)
        if weight is None:
            weight = tf.constant(1.0, tf.float64)
        dtypes = [tf.as_dtype(variable.dtype) for variable in self._variables]
        empty = [np.empty(0, dtype.as_numpy_dtype) for dtype in dtypes]

        def push(
            ran: np.ndarray,
            samples: np.ndarray,
            rate: np.ndarray,
            weight: np.ndarray,
            *arrays: np.ndarray,
        ) -> list[np.ndarray]:
            with self._job.reducer.remember_error():
                pushed = None
                if float(weight) > 0:
                    pushed = self._unflatten(numbers, sparse, arrays)
                    if self._job.settings.non_finite == "error":
                        self._check_finite(pushed)
                position = NO_POSITION
                if ends and self.position is not None:
                    position = self.position(int(ran), int(samples))
                weights = self.client.push(
                    pushed,
                    weight=float(weight),
                    learning_rate=float(rate),
                    position=position,
                    overlap=self._job.settings.overlap,
                )
                return [np.array(weights is not None), *(weights or empty)]

        def assign() -> None:
            for variable, value in zip(self._variables, weights):
                value.set_shape(variable.shape)
                variable.assign(value)

        counts = [tf.identity(v.value) for v in (self._job.steps.ran, self._job.steps.samples)]
        has_weights, *weights = tf.numpy_function(
            push, [*counts, rate, weight, *flat], [tf.bool, *dtypes]
        )
        has_weights.set_shape([])
        tf.cond(has_weights, assign, lambda: None)

    def skip_step(self) -> None:
        """Report a step without gradients to the servers."""
        zero = tf.constant(0.0, tf.float64)
        # Accumulated gradients of earlier steps may still wait for their update.
        self.step([], [], weight=zero, learning_rate=None, ends=not self._accumulates)

    def _unflatten(
        self, numbers: Sequence[int], sparse: Sequence[bool], arrays: Sequence[np.ndarray]
    ) -> list[Gradient]:
        """Return a gradient for each variable, or None for a variable without a gradient."""
        gradients: list[Gradient] = [None] * len(self._variables)
        left = iter(arrays)
        for number, is_sparse in zip(numbers, sparse):
            array = next(left)
            if is_sparse:
                gradients[number] = Rows(array.astype(np.int64, copy=False), next(left))
            else:
                gradients[number] = array
        return gradients

    def _check_finite(self, gradients: Sequence[Gradient]) -> None:
        names = [v.path for v, entry in zip(self._variables, gradients) if entry is not None]
        values = [e.values if isinstance(e, Rows) else e for e in gradients if e is not None]
        if bad := name_non_finite(names, values):
            raise NonFiniteError(
                f"A gradient is not finite: {', '.join(bad[:5])}. It was not sent to the parameter "
                "servers. Lower the learning rate, clip gradients or look at the data of this "
                "rank; HVDTRAIN_NON_FINITE=ignore lets such values through."
            )


def refuse_training(*args: Any, **options: Any) -> NoReturn:
    """Raise ModelError, because parameter servers support training only in ``fit``."""
    raise ModelError(
        "Parameter servers support training only in fit, not in train_on_batch or a custom "
        "training loop. Call model.fit, or leave --mode out."
    )
