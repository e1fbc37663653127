"""An optimizer that leaves the update of the variables to parameter servers.

The gradients of a step go to the servers where a Keras optimizer would clip and apply them, after
gradient accumulation; the servers' optimizers clip, decay and update.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.keras.optimizer import KeepsWeights, keep_weights, mix_in, plain_optimizers
from hvdtrain.keras.served.exchange import Exchange

__all__ = ["check_averages", "leave_updates_to_servers"]


class _LeavesUpdates(KeepsWeights):
    """Mixed into the class of a plain optimizer; saved as the plain class."""

    _hvdtrain_reducer: Exchange

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_waiting is not None and weight is not None:
            # Batches of one step needn't be equal.
            grads = [g if g is None else g * tf.cast(weight, g.dtype) for g in grads]
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        settable = isinstance(self._learning_rate, keras.Variable)  # type: ignore[attr-defined]
        weight = self._hvdtrain_take_weight()
        if self._hvdtrain_waiting is not None and weight is not None:
            grads = [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in grads]
        self._hvdtrain_reducer.step(
            grads,
            trainable_variables,
            weight=weight,
            learning_rate=learning_rate if settable else None,
        )


class _CountsOverflows:
    """Mixed into ``LossScaleOptimizer``: servers are told of a step whose gradients overflowed."""

    _hvdtrain_reducer: Exchange

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        tf.cond(finite, lambda: None, self._hvdtrain_reducer.skip_step)
        return finite


def check_averages(optimizer: Any) -> None:
    """See that no average of the weights is to be kept, which only the servers could do.

    Raises:
        ModelError: One is.
    """
    if any(leaf.use_ema for leaf in plain_optimizers(optimizer)):
        raise ModelError(
            "With parameter servers an optimizer can't keep averages of the weights (use_ema=True)."
            " Leave use_ema out, or --mode."
        )


def leave_updates_to_servers(optimizer: Any, exchange: Exchange) -> None:
    """Let ``optimizer`` send its gradients; it is saved, and loaded elsewhere, as it was."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mix_in(optimizer, _CountsOverflows, exchange)
    for leaf in plain_optimizers(optimizer):
        mix_in(leaf, _LeavesUpdates, exchange)
        keep_weights(leaf, "float64")
