"""Steps that a rank makes by itself, and the rounds that they are part of."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.batch_normalization import RowFlag
from hvdtrain.keras.compute import Compute
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.loss_weights import ratio
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.own_updates import OwnLossWeights

__all__ = ["LocalSteps"]


class LocalSteps(ModelSteps):
    """Runs steps as ``ModelSteps`` does, with no gradient that meets those of other ranks."""

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        compute: Compute,
        flag: RowFlag,
        averaging: WeightAveraging,
    ) -> None:
        self._own_weights = _LocalLossWeights(reducer)
        super().__init__(model, reducer, compute, flag, self._own_weights)
        self._averaging = averaging

    def follow(self, ranks: int) -> None:
        """Call when so many ranks are left."""
        self._own_weights.ranks.assign(ranks)

    def train(self, data: Any) -> Any:
        self._averaging.begin_step()
        logs = super().train(data)
        self._averaging.end_step(self._own_weights.contribution)
        return logs


class _LocalLossWeights(OwnLossWeights):
    """Lets sums over samples be those of the joint batch, in the average of all ranks."""

    exchanges = ("test",)

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        self.ranks = keras.Variable(
            float(reducer.collectives.size), dtype="float32", trainable=False, name="ranks"
        )

    def joint_rows(self, rows: tf.Tensor, known: tf.Tensor | None, sums: bool) -> tf.Tensor:
        if known is None and sums:
            known = self._of_all(rows)
        return super().joint_rows(rows, known, sums)

    def weight(self, rows: tf.Tensor, joint_rows: tf.Tensor, sums: bool) -> tf.Tensor:
        weight = super().weight(rows, joint_rows, sums)
        if not sums:
            return weight
        # A rank without samples has its part in the average as well: it adds nothing.
        self.contribution = tf.ones_like(self.contribution)
        return weight * self.ranks.value * ratio(rows, joint_rows)
