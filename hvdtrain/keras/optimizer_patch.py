"""An optimizer that averages gradients over all ranks just before it clips and applies them.

``_clip_gradients`` is the one point of a Keras optimizer that lies after gradient accumulation
and before clipping, weight decay and the update: reducing there costs one reduction for K
accumulated steps, and clipping sees the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.indexed_slices import scaled
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import accumulated_gradients, register_like, set_untracked
from hvdtrain.tensorflow.variable_names import variable_label

__all__ = [
    "FiniteCheckMixin",
    "GradientAveragingMixin",
    "GradientWeightMixin",
    "LocalUpdateMixin",
    "WeightedStepsMixin",
    "Weighting",
    "accumulates",
    "accumulator_variables",
    "check_inner_optimizers",
    "distribute_optimizer",
    "is_distributed",
    "mark_distributed",
    "mix_in",
    "mix_in_weighted_steps",
    "plain_optimizers",
    "remove_mixins",
    "track_gradient_weights",
    "weighting",
]


_MARK = "_hvdtrain_reducer"


class Weighting(NamedTuple):
    """The treatment of the gradients of one step on their way into the optimizer.

    Attributes:
        factor: Multiplies them before they are accumulated; None for 1.
        weight: What this rank's gradients have been multiplied with in all, for jobs in which
            ranks may be lost; see ``GradientReducer.average``.
        op: How those of the ranks are combined.
    """

    factor: tf.Tensor | None = None
    weight: tf.Tensor | None = None
    op: Literal["average", "sum"] = "average"


class GradientWeightMixin:
    """An optimizer mixin that tracks the weight of gradients, also of accumulated ones."""

    _hvdtrain_weighting = Weighting()
    # The sum of the weights of accumulated gradients.
    _hvdtrain_waiting: keras.Variable | None = None

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_waiting is not None and weight is not None:
            self._hvdtrain_waiting.assign_add(weight)
        super()._backend_increment_gradient_accumulators(grads, acc_grads)  # type: ignore[misc]

    def _hvdtrain_take_weight(self) -> tf.Tensor | None:
        """The mean weight of the gradients that are applied now."""
        waiting, weight = self._hvdtrain_waiting, self._hvdtrain_weighting.weight
        if weight is None or waiting is None:
            return weight
        total = tf.convert_to_tensor(waiting) + weight
        waiting.assign(tf.zeros_like(total))
        return total / float(self.gradient_accumulation_steps)  # type: ignore[attr-defined]


def track_gradient_weights(optimizer: Any, dtype: str) -> None:
    """Let a plain optimizer that accumulates gradients know what they count for, in this dtype."""
    accumulates = optimizer.gradient_accumulation_steps
    waiting = keras.Variable(0.0, dtype=dtype, trainable=False) if accumulates else None
    set_untracked(optimizer, "_hvdtrain_waiting", waiting)


class GradientAveragingMixin(GradientWeightMixin):
    """A mixin: a plain optimizer averages gradients over all ranks; saved as the plain class."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_missing: Sequence[Any]
    _hvdtrain_applied: Sequence[Any]

    def _filter_empty_gradients(self, grads: Any, vars: Any) -> Any:
        factor = self._hvdtrain_weighting.factor
        if factor is not None:
            grads = [g if g is None else scaled(g, factor) for g in grads]
        # Which gradients are None is part of what the ranks must agree on.
        missing = [variable for gradient, variable in zip(grads, vars) if gradient is None]
        set_untracked(self, "_hvdtrain_missing", missing)
        return super()._filter_empty_gradients(grads, vars)  # type: ignore[misc]

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        # float8 scales travel as "gradients"; the largest of all ranks is the one that fits.
        grads = [
            self._hvdtrain_reducer.reduce(g, "max", variable_label(v))
            if self._overwrite_variable_with_gradient(v)  # type: ignore[attr-defined]
            else g
            for g, v in zip(grads, vars)
        ]
        left = super()._overwrite_variables_directly_with_gradients(grads, vars)  # type: ignore[misc]
        set_untracked(self, "_hvdtrain_applied", left[1])
        return left

    def _clip_gradients(self, grads: Any) -> Any:
        missing = self._hvdtrain_missing
        averages = self._hvdtrain_reducer.average(
            [*grads, *[None] * len(missing)],
            [*self._hvdtrain_applied, *missing],
            weight=self._hvdtrain_take_weight(),
            op=self._hvdtrain_weighting.op,
        )
        return super()._clip_gradients(averages[: len(grads)])  # type: ignore[misc]


class FiniteCheckMixin:
    """A mixin of ``LossScaleOptimizer``: an overflow on one rank skips the step on all.

    Gradients that are yet to be multiplied by 0 don't count: those of a rank without rows.
    """

    _hvdtrain_reducer: GradientReducer

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)  # type: ignore[misc]
        factor = plain_optimizers(self)[0]._hvdtrain_weighting.factor
        if factor is not None:
            finite |= tf.equal(factor, 0.0)
        mine = tf.cast(finite, tf.int32)
        return tf.cast(self._hvdtrain_reducer.reduce(mine, "min", "finite gradients"), tf.bool)


def distribute_optimizer(optimizer: Any, reducer: GradientReducer) -> Any:
    """Make ``optimizer`` average its gradients; returns the same object.

    Its class becomes a subclass of the same name and module, so that it is saved, and loaded
    elsewhere, as the plain optimizer it is. Doing it twice changes the reducer only.

    Raises:
        ModelError: Not a Keras 3 optimizer, or one whose parts are not known yet.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"Expected a Keras 3 optimizer, received {type(optimizer).__name__}. Optimizers of "
            "tf_keras or keras.optimizers.legacy must be replaced by those of keras.optimizers."
        )
    check_inner_optimizers(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distribute_optimizer(optimizer.inner_optimizer, reducer)
        mix_in(optimizer, FiniteCheckMixin, reducer)
    elif _inner_optimizers(optimizer):
        for inner in _inner_optimizers(optimizer):
            distribute_optimizer(inner, reducer)
        mark_distributed(optimizer, reducer)
    else:
        mix_in(optimizer, GradientAveragingMixin, reducer)
        if reducer.collectives.survives_losses:
            track_gradient_weights(optimizer, "float32")
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether ``distribute_optimizer`` has been applied to it."""
    return hasattr(optimizer, _MARK)


@contextmanager
def weighting(optimizers: Sequence[Any], how: Weighting) -> Iterator[None]:
    """Within the block gradients that are applied are treated so."""
    inner = [leaf for optimizer in optimizers for leaf in plain_optimizers(optimizer)]
    for leaf in inner:
        set_untracked(leaf, "_hvdtrain_weighting", how)
    try:
        yield
    finally:
        for leaf in inner:
            set_untracked(leaf, "_hvdtrain_weighting", Weighting())


def accumulates(optimizer: Any) -> bool:
    """Whether gradients of several steps are applied together."""
    return any(leaf.gradient_accumulation_steps for leaf in plain_optimizers(optimizer))


def accumulator_variables(optimizer: Any) -> list[Any]:
    """Return a plain optimizer's variables for gradients that wait for those of later steps."""
    waiting = getattr(optimizer, "_hvdtrain_waiting", None)
    return [*accumulated_gradients(optimizer), *([] if waiting is None else [waiting])]


def plain_optimizers(optimizer: Any) -> list[Any]:
    """List those that update weights, within a ``LossScaleOptimizer`` or a ``MultiOptimizer``."""
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    return _inner_optimizers(outer) or [outer]


def mix_in(optimizer: Any, mixin: type, way: Any) -> None:
    """Make the optimizer's class a subclass of ``mixin``, under the same name.

    There ``way``, to the other ranks, is found as ``_hvdtrain_reducer``.
    """
    plain = type(optimizer)
    if not issubclass(plain, mixin):
        names = {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "_hvdtrain_plain_class": plain,
        }
        mixed = type(plain.__name__, (mixin, plain), names)
        register_like(mixed, plain)
        optimizer.__class__ = mixed
    mark_distributed(optimizer, way)


def remove_mixins(optimizer: Any) -> None:
    """Give an optimizer, and those within it, the classes that they had before ``mix_in``."""
    for entry in (optimizer, *plain_optimizers(optimizer)):
        entry.__class__ = getattr(type(entry), "_hvdtrain_plain_class", type(entry))


def mark_distributed(optimizer: Any, way: Any) -> None:
    """Note that an optimizer is distributed, and by what way."""
    set_untracked(optimizer, _MARK, way)


def check_inner_optimizers(optimizer: Any) -> None:
    """Check that a ``MultiOptimizer`` has optimizers: a function makes them for each variable.

    Raises:
        ModelError: It doesn't; it would average nothing.
    """
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(outer, "optimizers", None) == []:
        raise ModelError(
            f"{type(outer).__name__} has no optimizers yet, as a function chooses them when it is "
            "built. Call optimizer.build(model.trainable_variables) before it is distributed."
        )


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """List the optimizers of a ``MultiOptimizer``; empty for any other."""
    inner = getattr(optimizer, "optimizers", None)
    return list(inner) if isinstance(inner, (list, tuple)) else []


class WeightedStepsMixin(GradientWeightMixin):
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


class LocalUpdateMixin(WeightedStepsMixin):
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


def mix_in_weighted_steps(optimizer: Any, mixin: type[WeightedStepsMixin], way: Any) -> None:
    """Let a plain optimizer update by itself, as ``mixin`` says; ``way`` as in ``mix_in``."""
    mix_in(optimizer, mixin, way)
    track_gradient_weights(optimizer, "float64")
