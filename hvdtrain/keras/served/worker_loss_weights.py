"""What a worker's loss counts for, where a server puts the gradients together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.loss_weights import LossWeights, contribution
from hvdtrain.keras.optimizer_patch import Weighting

__all__ = ["WorkerLossWeights"]


class WorkerLossWeights(LossWeights):
    """Leaves a worker's gradients as they are, and says beside them what they count for.

    Args:
        reducer: Of this worker alone.
        gathers: Whether servers put gradients of several workers together.
    """

    def __init__(self, reducer: GradientReducer, *, gathers: bool) -> None:
        super().__init__(reducer)
        self._gathers = gathers
        self._counts = tf.constant(0.0, tf.float64)

    def weight(
        self,
        kind: str,
        rows: tf.Tensor,
        joint_rows: tf.Tensor | None = None,
        sample_weight: Any = None,
    ) -> tf.Tensor:
        if kind == "sum" and self._gathers:
            raise ModelError(
                "Losses with reduction='sum' can't be put together by parameter servers that make "
                "a step of several workers' gradients. Use reduction='sum_over_batch_size', "
                "--mode async-ps without --staleness-bound 0, or --mode allreduce."
            )
        counts = contribution(kind, rows, sample_weight)
        self._counts = tf.cast(counts, tf.float64)
        if joint_rows is not None:
            # Where gradients are accumulated, each step is to count as much as the others.
            self._counts /= tf.maximum(tf.cast(joint_rows, tf.float64), 1.0)
        return tf.where(counts > 0, 1.0, 0.0)

    def weighting(self, kind: str, weight: tf.Tensor, factor: tf.Tensor | None) -> Weighting:
        return Weighting(factor=factor, weight=self._counts)
