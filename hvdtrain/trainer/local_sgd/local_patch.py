"""The methods that are replaced on a model if ranks average weights instead of gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.frameworks.tensorflow.xla import compiled_if_possible
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.backends.tensorflow import choose_compute
from hvdtrain.trainer.backends.tensorflow.model_steps import Compute, ModelSteps
from hvdtrain.trainer.batch_normalization import synchronized_layers
from hvdtrain.trainer.local_sgd.weight_averaging import OuterOptimizer, WeightAveraging
from hvdtrain.trainer.loss_weights import IndependentLossWeights, ratio
from hvdtrain.trainer.membership import Change
from hvdtrain.trainer.model_parts import check_can_be_averaged
from hvdtrain.trainer.model_patch import ModelPatch
from hvdtrain.trainer.optimizer_patch import (
    LocalUpdateMixin,
    check_inner_optimizers,
    mark_distributed,
    mix_in_weighted_steps,
    plain_optimizers,
)

__all__ = ["LocalModelPatch"]


class LocalModelPatch(ModelPatch):
    """Replaces methods of a model, if the job uses ``--mode local-sgd``."""

    def __init__(
        self, model: keras.Model, collectives: Engine, presharded: bool, settings: Settings
    ) -> None:
        super().__init__(model, collectives, presharded, settings)
        check_can_be_averaged(model, settings.mode)
        self._reducer = GradientReducer.of_job("weight")
        self._loss_weights = _LocalLossWeights(self._reducer)
        self._averaging = self._rounds = WeightAveraging(
            model,
            self._reducer,
            sync_every=settings.sync_every,
            outer=OuterOptimizer(
                learning_rate=settings.outer_learning_rate, momentum=settings.outer_momentum
            ),
        )

    def _distribute(self, optimizer: Any) -> None:
        check_inner_optimizers(optimizer)
        for leaf in plain_optimizers(optimizer):
            mix_in_weighted_steps(leaf, LocalUpdateMixin, self._reducer)
        mark_distributed(optimizer, self._reducer)

    def _make_steps(self) -> ModelSteps:
        compute = choose_compute(self._model, self._settings, self._warn_once)
        return _LocalSteps(self._loss_weights, self._rounds, self._model, self._reducer, compute)

    def _on_change(self, change: Change) -> None:
        super()._on_change(change)
        self._loss_weights.ranks.assign(len(change.now))

    def _synchronized_layers(self) -> list[Any]:
        if synchronized_layers(self._model):
            self._warn_once(
                "BatchNormalization(synchronized=True) normalizes each rank's batch separately "
                "with --mode local-sgd."
            )
        return []


class _LocalSteps(ModelSteps):
    """Runs the training steps of a model. Ranks average their weights after each round of steps."""

    def __init__(
        self,
        weights: _LocalLossWeights,
        rounds: WeightAveraging,
        model: keras.Model,
        reducer: GradientReducer,
        compute: Compute,
    ) -> None:
        super().__init__(model, reducer, compute, weights)
        self._loss_weights = weights
        self._rounds = rounds

    def train(self, data: Any) -> Any:
        self._rounds.begin_step()
        logs = super().train(data)
        self._rounds.end_step(self._loss_weights.contribution)
        return logs

    def _apply(self, gradients: Sequence[Any]) -> None:
        update = functools.partial(super()._apply, gradients)
        if self._compute.jit:
            # Ranks don't communicate in updates, so even the outermost optimizer can be compiled.
            compiled_if_possible("the optimizer's update", update)
        else:
            update()


class _LocalLossWeights(IndependentLossWeights):
    """Weights of losses if ranks average weights instead of gradients.

    A loss that is a sum is multiplied by the number of ranks. The mean of this loss over the ranks
    is therefore the sum over the batches of all ranks.

    Attributes:
        ranks: The number of ranks.
    """

    exchanges = ("test",)

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        self.ranks = keras.Variable(
            float(reducer.collectives.size), dtype="float32", trainable=False, name="ranks"
        )

    def joint_rows(self, rows: tf.Tensor, known: tf.Tensor | None, sums: bool) -> tf.Tensor:
        if known is None and sums:
            known = self._sum_over_ranks(rows)
        return super().joint_rows(rows, known, sums)

    def weight(self, rows: tf.Tensor, joint_rows: tf.Tensor, sums: bool) -> tf.Tensor:
        weight = super().weight(rows, joint_rows, sums)
        if not sums:
            return weight
        # Ranks without samples are part of the average too, and contribute zero to it.
        self.contribution = tf.ones_like(self.contribution)
        return weight * self.ranks.value * ratio(rows, joint_rows)
