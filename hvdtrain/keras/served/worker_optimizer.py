"""A worker's optimizer in a job with parameter servers.

It leaves the update of the variables to them: the gradients of a step go to the servers where a
Keras optimizer would clip and apply them, after gradient accumulation, and the servers' optimizers
clip, decay and update. Or, with elastic averaging, it updates the worker's own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras.optimizer_patch import KeepsWeights, keep_weights, mix_in, plain_optimizers
from hvdtrain.keras.served.elastic_averaging import ElasticExchange
from hvdtrain.keras.served.gradient_exchange import GradientExchange

__all__ = ["average_elastically", "leave_updates_to_servers"]


class _WeighsSteps(KeepsWeights):
    """Of the steps whose gradients are accumulated, each counts as much as its samples."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_waiting is not None and weight is not None:
            # Batches of one step needn't be equal.
            grads = [g if g is None else g * tf.cast(weight, g.dtype) for g in grads]
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    # The averages of weights (use_ema) are the servers'.

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        pass

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        pass

    def _hvdtrain_mean(self, grads: Any) -> tuple[tf.Tensor | None, Any]:
        """What the gradients that are applied now count for, and their mean."""
        weight = self._hvdtrain_take_weight()
        if self._hvdtrain_waiting is not None and weight is not None:
            grads = [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in grads]
        return weight, grads


class _LeavesUpdates(_WeighsSteps):
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
        weight, grads = self._hvdtrain_mean(grads)
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


class _AveragesElastically(_WeighsSteps):
    """Mixed into the class of a plain optimizer; saved as the plain class."""

    _hvdtrain_reducer: ElasticExchange
    _hvdtrain_counts: tf.Tensor | None = None

    def _clip_gradients(self, grads: Any) -> Any:
        weight, grads = self._hvdtrain_mean(grads)
        object.__setattr__(self, "_hvdtrain_counts", weight)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _apply_weight_decay(self, variables: Any) -> None:
        whole: Any = super()
        self._hvdtrain_if_any(lambda: whole._apply_weight_decay(variables))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        whole: Any = super()

        def update() -> None:
            whole._backend_update_step(grads, trainable_variables, learning_rate)
            self._hvdtrain_reducer.after_update()

        self._hvdtrain_if_any(update)

    def _hvdtrain_if_any(self, act: Callable[[], None]) -> None:
        """Act unless this worker has no samples in the step, as others may have some."""
        counts = self._hvdtrain_counts
        if counts is None:
            act()
        else:
            tf.cond(counts > 0, act, lambda: None)


def leave_updates_to_servers(optimizer: Any, exchange: GradientExchange) -> None:
    """Let ``optimizer`` send its gradients; it is saved, and loaded elsewhere, as it was."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mix_in(optimizer, _CountsOverflows, exchange)
    for leaf in plain_optimizers(optimizer):
        mix_in(leaf, _LeavesUpdates, exchange)
        keep_weights(leaf, "float64")


def average_elastically(optimizer: Any, exchange: ElasticExchange) -> None:
    """Let ``optimizer`` exchange weights after its updates; saved and loaded as it was."""
    for leaf in plain_optimizers(optimizer):
        mix_in(leaf, _AveragesElastically, exchange)
        keep_weights(leaf, "float64")
