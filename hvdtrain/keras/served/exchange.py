"""What a worker's steps exchange with the servers, inside TensorFlow's graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ModelError, NonFiniteError
from hvdtrain.keras.optimizer import accumulates
from hvdtrain.keras.steps import Steps
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.gradients import Gradient, Rows
from hvdtrain.parameter_server.protocol import NO_STAND
from hvdtrain.tensorflow.reducer import GradientReducer, name_non_finite

__all__ = ["Exchange", "refuse_training"]


class Exchange:
    """Takes the place of the optimizer's update on a worker.

    Args:
        model: Compiled and built.
        reducer: Keeps the errors that TensorFlow hides.
        steps: Of the model.
        is_chief: Whether the learning rate here is the one that counts.
        require_finite: Refuse gradients with NaN or infinity.
    """

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        steps: Steps,
        *,
        is_chief: bool,
        require_finite: bool,
    ) -> None:
        self._variables = list(model.trainable_variables)
        self._places = {id(variable): n for n, variable in enumerate(self._variables)}
        self._reducer = reducer
        self._steps = steps
        self._accumulates = accumulates(model.optimizer)
        self._is_chief = is_chief
        self._require_finite = require_finite
        self.client: Client | None = None
        """To the servers, within ``fit``."""
        self.stand: Callable[[int, int], tuple[int, ...]] | None = None
        """Says where this worker is in its data, from what ``Steps`` counts; None for nowhere."""

    def pull(self) -> None:
        """Take the newest weights."""
        self.assign(self.reach().pull())

    def assign(self, weights: Sequence[np.ndarray]) -> None:
        """Give the model other weights, of all trainable variables."""
        for variable, value in zip(self._variables, weights):
            variable.assign(value)

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        weight: tf.Tensor | None,
        learning_rate: Any,
    ) -> None:
        """Send gradients of some variables, and take the weights of all.

        Args:
            gradients: Tensors or ``IndexedSlices``.
            variables: What they belong to.
            weight: What they count for beside those of other workers; 0 for nothing.
            learning_rate: Of the optimizer; None where it follows a schedule.
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

        def run(
            ran: np.ndarray,
            samples: np.ndarray,
            counts: np.ndarray,
            rate: np.ndarray,
            *arrays: np.ndarray,
        ) -> list[np.ndarray]:
            with self._reducer.remember_error():
                found = _gradients(len(self._variables), places, sparse, arrays)
                stand = self._stand(ran, samples)
                if float(counts) <= 0:
                    return self._push(None, 0.0, float(rate), stand)
                if self._require_finite:
                    self._check_finite(found)
                return self._push(found, float(counts), float(rate), stand)

        self._run(run, [*self._counted(), counts, rate, *flat])

    def skip_step(self) -> None:
        """Tell the servers that this step has no gradients."""

        def run(ran: np.ndarray, samples: np.ndarray) -> list[np.ndarray]:
            # Gradients of earlier steps may wait here: those are not done yet.
            stand = NO_STAND if self._accumulates else self._stand(ran, samples)
            return self._push(None, 0.0, math.nan, stand)

        self._run(run, self._counted())

    def _counted(self) -> list[tf.Tensor]:
        return [tf.identity(v.value) for v in (self._steps.ran, self._steps.samples)]

    def _stand(self, ran: np.ndarray, samples: np.ndarray) -> tuple[int, ...]:
        return NO_STAND if self.stand is None else self.stand(int(ran), int(samples))

    def _run(self, function: Any, inputs: Sequence[Any]) -> None:
        """Run Python that returns weights, as part of the step."""
        types = [tf.as_dtype(variable.dtype) for variable in self._variables]
        weights = tf.numpy_function(function, inputs, types)
        if len(types) == 1 and not isinstance(weights, (list, tuple)):
            weights = [weights]
        for variable, value in zip(self._variables, weights):
            value.set_shape(variable.shape)
            variable.assign(value)

    def _push(
        self,
        gradients: Sequence[Gradient] | None,
        weight: float,
        rate: float,
        stand: tuple[int, ...],
    ) -> list[np.ndarray]:
        return self.reach().push(gradients, weight=weight, learning_rate=rate, stand=stand)

    def _check_finite(self, gradients: Sequence[Gradient]) -> None:
        names = [v.path for v, gradient in zip(self._variables, gradients) if gradient is not None]
        values = [g.values if isinstance(g, Rows) else g for g in gradients if g is not None]
        if bad := name_non_finite(names, values):
            raise NonFiniteError(
                f"A gradient is not finite: {', '.join(bad[:5])}. It was not sent to the parameter "
                "servers. Lower the learning rate, clip gradients or look at the data of this "
                "rank; HVDTRAIN_NON_FINITE=ignore lets such values through."
            )

    def reach(self) -> Client:
        """The way to the servers.

        Raises:
            ModelError: There is none now.
        """
        if self.client is None:
            refuse_training()
        return self.client


def refuse_training() -> NoReturn:
    """Raise ModelError where a model is to train outside of ``fit``."""
    raise ModelError(
        "With parameter servers a model trains in fit alone: there is nobody to take the gradients "
        "of train_on_batch, or of a training loop of your own. Call model.fit, or leave --mode out."
    )


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
