"""The averages of all ranks' weights in local SGD. Between them, each rank trains independently."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import moving_averages
from hvdtrain.trainer.model_parts import layer_statistics, overrides, plain_optimizers_of
from hvdtrain.trainer.rank_random import seed_generators

__all__ = ["OuterOptimizer", "WeightAveraging"]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD with Nesterov momentum, applied to the change of the averaged weights in a round.

    This is algorithm 1 of DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication
    Training of Language Models", arXiv 2311.08105). With a learning rate of 1 and no momentum, the
    algorithm only averages weights, which is called local SGD (Stich 2019, "Local SGD Converges
    Fast and Communicates Little", arXiv 1805.09767).
    """

    learning_rate: float = 1.0  # the factor by which the change is multiplied
    # The fraction of the velocity that is kept in each step. It is at least 0 and below 1.
    momentum: float = 0.0

    @property
    def is_plain_average(self) -> bool:
        """Whether this optimizer only averages: the next round starts from the averaged weights."""
        return self.learning_rate == 1.0 and not self.momentum

    def step(self, anchor: Any, average: Any, velocity: Any) -> tuple[Any, Any]:
        """Return the weights for the next round, and the next velocity.

        Args:
            anchor: The weights at the start of the round; arrays or tensors of any shape.
            average: The mean of the ranks' weights at the end of the round.
            velocity: The velocity from the previous step. It is initially zero, and unused if there
                is no momentum.
        """
        gradient = anchor - average
        if not self.momentum:
            return anchor - self.learning_rate * gradient, velocity
        velocity = self.momentum * velocity + gradient
        return anchor - self.learning_rate * (gradient + self.momentum * velocity), velocity


class WeightAveraging:
    """Trains a model in rounds of steps. At the end of a round, ranks average their weights.

    A round also ends at the end of an epoch, before a validation and before a checkpoint. The next
    round starts with the next step, from the weights at that time.
    """

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        *,
        sync_every: int,
        outer: OuterOptimizer,
    ) -> None:
        self._model = model
        self._reducer = reducer
        self._sync_every = sync_every
        self._outer = outer
        self._variables = _averaged_variables(model)
        self._steps = keras.Variable(0, dtype="int64", trainable=False, name="steps_of_round")
        # The weight of this rank's steps relative to other ranks.
        self._counts = keras.Variable(0.0, dtype="float64", trainable=False, name="counts")
        self._anchors = [] if outer.is_plain_average else self._like_variables("anchor")
        # velocities of the outer optimizer, equal on all ranks
        self.velocities = self._like_variables("outer_velocity") if outer.momentum else []

    def begin_step(self) -> None:
        """Start a round if none is in progress. Must come first in the graph of each step."""
        if self._anchors:
            tf.cond(self._steps.value == 0, self._begin_round, lambda: None)

    def end_step(self, contribution: tf.Tensor) -> None:
        """Count a step, and average the weights after the last step of a round.

        Must come last in the graph of each step.

        ``contribution`` is the weight of this step in the average: the number of samples, as
        float64.
        """
        self._steps.assign_add(1)
        self._counts.assign_add(contribution)
        tf.cond(self._steps.value >= self._sync_every, self._end_round, lambda: None)

    @property
    def joined(self) -> bool:
        """Whether all ranks have the same weights at the moment."""
        return int(self._steps.numpy()) == 0

    def end_round(self) -> Collection[int] | None:
        """End the current round early, between two steps. All ranks must call this.

        Returns:
            The ranks whose steps are in the average. None if the round had no steps.
        """
        if self.joined:
            return None
        contributions = self._reducer.contributions
        contributions.begin_step()
        self._end_round()
        (members,) = contributions.take()
        return self._reducer.collectives.members if members is None else members

    def averages_of_weights(self) -> list[Any]:
        """Return the moving averages of this rank's weights from optimizers with ``use_ema``."""
        leaves = [leaf for leaf in plain_optimizers_of(self._model) if leaf.use_ema and leaf.built]
        return [v for leaf in leaves for v in moving_averages(leaf) if v is not None]

    def _begin_round(self) -> None:
        for anchor, variable in zip(self._anchors, self._variables):
            anchor.assign(variable.value)

    def _end_round(self) -> None:
        factor = _weight_of_rank(self._counts.value, self._reducer)
        weights = [tf.convert_to_tensor(variable.value) for variable in self._variables]
        weighted = [weight * tf.cast(factor, weight.dtype) for weight in weights]
        averages = self._reducer.average(weighted, self._variables, weight=factor)
        if self._anchors:
            velocities = self.velocities or [None] * len(averages)
            for n, (anchor, velocity) in enumerate(zip(self._anchors, velocities)):
                before = None if velocity is None else velocity.value
                averages[n], after = self._outer.step(anchor.value, averages[n], before)
                if velocity is not None:
                    velocity.assign(after)
        for variable, value in zip(self._variables, averages):
            variable.assign(value)
        self._steps.assign(0)
        self._counts.assign(0.0)

    def _like_variables(self, name: str) -> list[Any]:
        return [
            keras.Variable("zeros", shape=v.shape, dtype=v.dtype, trainable=False, name=name)
            for v in self._variables
        ]


def _averaged_variables(model: keras.Model) -> list[Any]:
    """Return the variables to average, which steps change differently on each rank.

    A custom ``train_step`` may also change other variables of the model, such as a target network.
    """
    if not overrides(model, "train_step"):
        return list(model.trainable_variables)
    seeds = [generator.state for generator in seed_generators(model)]
    others = {id(v) for v in (*layer_statistics(model), *seeds, *model.metrics_variables)}
    kept = [v for v in model.variables if id(v) not in others]
    return [v for v in kept if tf.as_dtype(v.dtype).is_floating]


def _weight_of_rank(counts: tf.Tensor, reducer: GradientReducer) -> tf.Tensor:
    """Return the factor of this rank's weights in the average of all ranks' weights.

    Ranks exchange how many samples they trained on. If all ranks have the same number, the factor
    is 1.
    """
    own = tf.stack([tf.convert_to_tensor(counts), tf.ones([], counts.dtype)])
    total, ranks = tf.unstack(reducer.reduce(own, "sum", "steps of all ranks"))
    return tf.where(total > 0, ranks * counts / total, tf.ones_like(total))
