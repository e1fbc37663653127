"""``LocalSgd``, the strategy in which ranks average weights instead of gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.xla import compiled_if_possible
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.allreduce import install_loops, rescale_rates
from hvdtrain.trainer.backends.tensorflow import choose_compute
from hvdtrain.trainer.backends.tensorflow.independent_ranks import (
    IndependentLossWeights,
    LocalUpdateMixin,
    mix_in_weighted_steps,
)
from hvdtrain.trainer.backends.tensorflow.model_steps import Compute, ModelSteps
from hvdtrain.trainer.batch_normalization import synchronized_layers
from hvdtrain.trainer.local_sgd.weight_averaging import OuterOptimizer, WeightAveraging
from hvdtrain.trainer.loss_weights import ratio
from hvdtrain.trainer.membership import Change
from hvdtrain.trainer.model_parts import check_can_be_averaged, optimizers_of
from hvdtrain.trainer.model_patch import ModelPatch
from hvdtrain.trainer.optimizer_patch import (
    check_inner_optimizers,
    mark_distributed,
    plain_optimizers,
)

__all__ = ["LocalSgd"]


class LocalSgd:
    """The strategy in which each rank trains its own weights, and ranks average them at times."""

    def __init__(self) -> None:
        self._reducer = GradientReducer.of_job("weight")
        self._weights = _LocalLossWeights(self._reducer)

    def install(self, patch: ModelPatch) -> None:
        """Replace the model's methods. All ranks must call this.

        Raises:
            ModelError: If the model's weights can't be averaged.
        """
        model, reducer, settings = patch.model, self._reducer, patch.settings
        check_can_be_averaged(model, settings.mode)
        if synchronized_layers(model):
            patch.warn_once(
                "BatchNormalization(synchronized=True) normalizes each rank's batch separately "
                "with --mode local-sgd."
            )
        outer = OuterOptimizer(
            learning_rate=settings.outer_learning_rate, momentum=settings.outer_momentum
        )
        rounds = WeightAveraging(model, reducer, sync_every=settings.sync_every, outer=outer)
        for optimizer in optimizers_of(model):
            check_inner_optimizers(optimizer)
            for leaf in plain_optimizers(optimizer):
                mix_in_weighted_steps(leaf, LocalUpdateMixin, reducer)
            mark_distributed(optimizer, reducer)
        compute = choose_compute(model, settings, patch.warn_once)
        steps = _LocalSteps(self._weights, rounds, model, reducer, compute)
        install_loops(patch, reducer, steps, averaging=rounds)

    def on_change(self, model: keras.Model, change: Change) -> None:
        """Adapt the learning rates and the weights of losses to the number of ranks."""
        rescale_rates(model, change)
        self._weights.ranks.assign(len(change.now))


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
    """

    exchanges = ("test",)

    def __init__(self, reducer: GradientReducer) -> None:
        super().__init__(reducer)
        # the number of ranks
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
