"""Optimizers and loss weights for modes in which each rank applies only its local gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.frameworks.tensorflow.tensors import scaled
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import set_untracked
from hvdtrain.trainer.loss_weights import LossWeights, Term
from hvdtrain.trainer.optimizer_mixins import GradientWeightMixin, Weighting
from hvdtrain.trainer.optimizer_patch import mix_in, track_weights

__all__ = [
    "IndependentLossWeights",
    "LocalUpdateMixin",
    "WeightedStepsMixin",
    "mix_in_weighted_steps",
]


class WeightedStepsMixin(GradientWeightMixin):
    """Mixin for an optimizer that accumulates gradients, weighted by the samples of a step."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Multiply gradients by the weight of their step, then accumulate or apply them.

        Without gradient accumulation, gradients are not multiplied.
        """
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_weight_sum is not None and weight is not None:
            grads = [g if g is None else scaled(g, weight) for g in grads]
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _hvdtrain_take_mean(self, grads: Any) -> tuple[tf.Tensor | None, Any]:
        """Return two values: the mean weight, and the weighted mean of the accumulated gradients.

        ``grads`` is the mean of the accumulated gradients, each multiplied by its weight.
        """
        weight = self._hvdtrain_take_weight()
        if self._hvdtrain_weight_sum is not None and weight is not None:
            grads = [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in grads]
        return weight, grads


class LocalUpdateMixin(WeightedStepsMixin):
    """Mixin with which an optimizer updates weights with the gradients of this rank only.

    The optimizer is saved under its original class, without the mixin. In a step without samples on
    this rank, the weights don't change.
    """

    _hvdtrain_weight: tf.Tensor | None = None

    def _clip_gradients(self, grads: Any) -> Any:
        weight, grads = self._hvdtrain_take_mean(grads)
        set_untracked(self, "_hvdtrain_weight", weight)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _apply_weight_decay(self, variables: Any) -> None:
        decay = super()._apply_weight_decay  # type: ignore[misc]
        self._hvdtrain_if_samples(lambda: decay(variables))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        update = super()._backend_update_step  # type: ignore[misc]
        self._hvdtrain_if_samples(lambda: update(grads, trainable_variables, learning_rate))

    def _hvdtrain_if_samples(self, act: Callable[[], None]) -> None:
        weight = self._hvdtrain_weight
        if weight is None:
            act()
        else:
            tf.cond(weight > 0, act, lambda: None)


def mix_in_weighted_steps(optimizer: Any, mixin: type[WeightedStepsMixin], reducer: Any) -> None:
    """Add ``mixin`` to an optimizer whose updates use the gradients of this rank only."""
    mix_in(optimizer, mixin, reducer)
    track_weights(optimizer, "float64")


class IndependentLossWeights(LossWeights):
    """Weights of losses in ``--mode local-sgd``, where each rank trains its own weights.

    The loss itself has weight 1. ``contribution`` is the weight of the step when the ranks later
    average their model weights.
    """

    exchanges: tuple[str, ...] = ()  # ranks may be at different steps

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        self.contribution = tf.constant(0.0, tf.float64)
        """The weight of the current step in an average over ranks: its number of rows or values."""
        self._joint_rows = self.contribution

    def joint_rows(self, rows: tf.Tensor, known: tf.Tensor | None, sums: bool) -> tf.Tensor:
        """Return the number of rows of all ranks if it is known, otherwise this rank's rows."""
        # Contributions are divided by the number of joint rows, so that all accumulated steps have
        # the same weight. If the joint rows are unknown, steps are weighted by this rank's rows.
        self._joint_rows = tf.cast(1 if known is None else tf.maximum(known, 1), tf.float64)
        return rows if known is None else known

    def weight(self, rows: tf.Tensor, joint_rows: tf.Tensor, sums: bool) -> tf.Tensor:
        """Return 1, or 0 if this rank has no rows."""
        self.contribution = tf.cast(rows, tf.float64)
        return tf.where(rows > 0, 1.0, 0.0)

    def weighting(
        self,
        sums: bool,
        weight: tf.Tensor,
        factor: tf.Tensor | None,
        terms: Sequence[Term | None],
    ) -> Weighting:
        """Return the weight of this step among the steps whose gradients are accumulated."""
        if (only := Weighting(terms=terms).only) is not None:
            self.contribution = tf.cast(only.count, tf.float64)
        return Weighting(factor=factor, weight=self.contribution / self._joint_rows)
