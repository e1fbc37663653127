"""Averages the weights of all ranks after so many steps that each has made by itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.model_parts import layer_statistics, overrides, plain_optimizers_of
from hvdtrain.keras.rank_random import seed_generators
from hvdtrain.private_api.keras import moving_averages

__all__ = ["OuterOptimizer", "WeightAveraging"]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD with Nesterov momentum on what a round of steps has changed.

    DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv 2311.08105), algorithm 1. With a rate of 1 and without momentum it is plain
    averaging, local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv
    1805.09767).

    Attributes:
        learning_rate: What the outer gradient is multiplied with.
        momentum: How much of the velocity is kept, from 0 on, below 1.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def takes_average(self) -> bool:
        """Whether the average itself is what ranks go on with."""
        return self.learning_rate == 1.0 and not self.momentum

    def step(self, anchor: Any, average: Any, velocity: Any) -> tuple[Any, Any]:
        """The weights that all ranks go on with, and the next velocity.

        Args:
            anchor: The weights that the round began with; arrays or tensors, of any shape.
            average: The mean of the weights that ranks have at its end.
            velocity: What the step before returned, zeros at first; not used without momentum.
        """
        gradient = anchor - average
        if not self.momentum:
            return anchor - self.learning_rate * gradient, velocity
        velocity = self.momentum * velocity + gradient
        return anchor - self.learning_rate * (gradient + self.momentum * velocity), velocity


class WeightAveraging:
    """The rounds of a model's training: steps of each rank by itself, then an average of all.

    A round also ends where others are to see the weights: at the end of an epoch, before a
    validation and before a checkpoint. The next one begins with the step after that, from the
    weights that there are then.

    Args:
        model: Compiled and built.
        reducer: Averages weights as others do gradients.
        sync_every: Steps of a round.
        outer: What becomes of the average.
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
        # What this rank's steps count for beside those of others.
        self._counts = keras.Variable(0.0, dtype="float64", trainable=False, name="counts")
        self._anchors = [] if outer.takes_average else self._like_variables("anchor")
        self.velocities = self._like_variables("outer_velocity") if outer.momentum else []
        """The velocities that the outer optimizer keeps from round to round; alike on all ranks."""

    def begin_step(self) -> None:
        """Call before each step of this rank, as part of it."""
        if self._anchors:
            tf.cond(self._steps.value == 0, self._begin_round, lambda: None)

    def end_step(self, contribution: tf.Tensor) -> None:
        """Call after each step, as part of it; all ranks average where it is the round's last.

        Args:
            contribution: What it counts for beside those of other ranks, float64: its samples.
        """
        self._steps.assign_add(1)
        self._counts.assign_add(contribution)
        tf.cond(self._steps.value >= self._sync_every, self._end_round, lambda: None)

    @property
    def joined(self) -> bool:
        """Whether all ranks have the same weights: no step was made since the last round."""
        return int(self._steps.numpy()) == 0

    def end_round(self) -> Collection[int] | None:
        """End the round now, between two steps; collective.

        Returns:
            The members whose steps are in the weights by that; None where there were no steps.
        """
        if self.joined:
            return None
        contributions = self._reducer.contributions
        contributions.begin_step()
        self._end_round()
        (members,) = contributions.take()
        return self._reducer.collectives.members if members is None else members

    def averages_of_weights(self) -> list[Any]:
        """Return the averages that optimizers with ``use_ema`` keep of this rank's weights."""
        leaves = [leaf for leaf in plain_optimizers_of(self._model) if leaf.use_ema and leaf.built]
        return [v for leaf in leaves for v in moving_averages(leaf) if v is not None]

    def _begin_round(self) -> None:
        for anchor, variable in zip(self._anchors, self._variables):
            anchor.assign(variable.value)

    def _end_round(self) -> None:
        factor = _share(self._counts.value, self._reducer)
        weights = [tf.convert_to_tensor(variable.value) for variable in self._variables]
        weighted = [weight * tf.cast(factor, weight.dtype) for weight in weights]
        averages = self._reducer.average(weighted, self._variables, weight=factor)
        self._assign(averages)
        self._steps.assign(0)
        self._counts.assign(0.0)

    def _assign(self, averages: list[Any]) -> None:
        if self._anchors:
            velocities = self.velocities or [None] * len(averages)
            for n, (anchor, velocity) in enumerate(zip(self._anchors, velocities)):
                kept = None if velocity is None else velocity.value
                averages[n], kept = self._outer.step(anchor.value, averages[n], kept)
                if velocity is not None:
                    velocity.assign(kept)
        for variable, value in zip(self._variables, averages):
            variable.assign(value)

    def _like_variables(self, name: str) -> list[Any]:
        return [
            keras.Variable("zeros", shape=v.shape, dtype=v.dtype, trainable=False, name=name)
            for v in self._variables
        ]


def _averaged_variables(model: keras.Model) -> list[Any]:
    """The variables that steps change on each rank otherwise, and that have an average.

    A ``train_step`` of the user's may change more than what is trained, such as a network that
    follows another.
    """
    if not overrides(model, "train_step"):
        return list(model.trainable_variables)
    seeds = [generator.state for generator in seed_generators(model)]
    apart = {id(v) for v in (*layer_statistics(model), *seeds, *model.metrics_variables)}
    kept = [v for v in model.variables if id(v) not in apart]
    return [v for v in kept if tf.as_dtype(v.dtype).is_floating]


def _share(counts: tf.Tensor, reducer: GradientReducer) -> tf.Tensor:
    """Return what to multiply this rank's weights with before they are averaged; communicates.

    Equal counts give 1, which leaves a plain average.
    """
    mine = tf.stack([tf.convert_to_tensor(counts), tf.ones([], counts.dtype)])
    total, ranks = tf.unstack(reducer.reduce(mine, "sum", "steps of all ranks"))
    return tf.where(total > 0, ranks * counts / total, tf.ones_like(total))
