"""Updates that a rank makes by itself, of its own samples, and what its steps count for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.gradients.indexed_slices import scaled
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.loss_weights import LossWeights, Term
from hvdtrain.keras.optimizer_patch import KeepsWeights, Weighting, keep_weights, mix_in

__all__ = ["OwnLossWeights", "UpdatesAlone", "WeighsSteps", "weigh_steps"]


class OwnLossWeights(LossWeights):
    """Leaves a rank's gradients as they are, and keeps what they count for."""

    exchanges: tuple[str, ...] = ()  # ranks may be at different steps

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        self.contribution = tf.constant(0.0, tf.float64)
        """The weight of the current step next to those of other ranks: its rows or values."""
        self._joint_rows = self.contribution

    def joint_rows(self, rows: tf.Tensor, known: tf.Tensor | None, sums: bool) -> tf.Tensor:
        # Where gradients are accumulated, each step is to count as much as the others.
        self._joint_rows = tf.cast(1 if known is None else tf.maximum(known, 1), tf.float64)
        return rows if known is None else known

    def weight(self, rows: tf.Tensor, joint_rows: tf.Tensor, sums: bool) -> tf.Tensor:
        self.contribution = tf.cast(rows, tf.float64)
        return tf.where(rows > 0, 1.0, 0.0)

    def weighting(
        self, sums: bool, weight: tf.Tensor, factor: tf.Tensor | None, only: Term | None
    ) -> Weighting:
        if only is not None:
            self.contribution = tf.cast(only.count, tf.float64)
        return Weighting(factor=factor, weight=self.contribution / self._joint_rows)


class WeighsSteps(KeepsWeights):
    """Lets each of the steps whose gradients are accumulated count as much as its samples."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_waiting is not None and weight is not None:
            # Batches of one step needn't be equal.
            grads = [g if g is None else scaled(g, weight) for g in grads]
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _hvdtrain_take_mean(self, grads: Any) -> tuple[tf.Tensor | None, Any]:
        """Returns how much the gradients that are applied now count, and their mean."""
        weight = self._hvdtrain_take_weight()
        if self._hvdtrain_waiting is not None and weight is not None:
            grads = [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in grads]
        return weight, grads


class UpdatesAlone(WeighsSteps):
    """A mixin: a plain optimizer updates from this rank's gradients; saved as the plain class.

    A step in which this rank has no samples, as others may have some, changes no weight.
    """

    _hvdtrain_counts: tf.Tensor | None = None

    def _clip_gradients(self, grads: Any) -> Any:
        weight, grads = self._hvdtrain_take_mean(grads)
        object.__setattr__(self, "_hvdtrain_counts", weight)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _apply_weight_decay(self, variables: Any) -> None:
        decay = super()._apply_weight_decay  # type: ignore[misc]
        self._hvdtrain_if_any(lambda: decay(variables))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        update = super()._backend_update_step  # type: ignore[misc]
        self._hvdtrain_if_any(lambda: update(grads, trainable_variables, learning_rate))

    def _hvdtrain_if_any(self, act: Callable[[], None]) -> None:
        """Act unless this rank has no samples in the step."""
        counts = self._hvdtrain_counts
        if counts is None:
            act()
        else:
            tf.cond(counts > 0, act, lambda: None)


def weigh_steps(optimizer: Any, mixin: type[WeighsSteps], way: Any) -> None:
    """Let a plain optimizer update by itself, as ``mixin`` says; ``way`` as in ``mix_in``."""
    mix_in(optimizer, mixin, way)
    keep_weights(optimizer, "float64")
