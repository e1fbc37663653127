"""Optimizers that average gradients over all ranks just before they clip and apply them.

``_clip_gradients`` is the only method of a Keras optimizer that runs after gradient accumulation
and before clipping, weight decay and the update. If gradients are reduced there, K accumulated
steps need only one reduction, and the average is clipped instead of each rank's gradients.
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
from hvdtrain.private_api.keras import (
    accumulated_gradients,
    accumulators_of,
    iterations_of,
    register_as,
    set_untracked,
)
from hvdtrain.tensorflow.variable_names import variable_label
from hvdtrain.tensorflow.xla import compiled_if_possible

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
    "weighting",
]

_MARK = "_hvdtrain_reducer"


class Weighting(NamedTuple):
    """How an optimizer combines the gradients of one step with those of other ranks and steps.

    Attributes:
        factor: A factor for the gradients, applied before they are accumulated. None means 1.
        weight: The total weight that the gradients were multiplied by. If ranks are lost,
            ``GradientReducer.average`` divides by the remaining weights.
        op: The reduction over the ranks.
    """

    factor: tf.Tensor | None = None
    weight: tf.Tensor | None = None
    op: Literal["average", "sum"] = "average"


class GradientWeightMixin:
    """Tracks the weight of gradients. ``_track_weights`` includes accumulated gradients."""

    _hvdtrain_weighting = Weighting()
    _hvdtrain_jit = False
    _hvdtrain_weight_sum: keras.Variable | None = None  # of the accumulated gradients

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_weight_sum is not None and weight is not None:
            self._hvdtrain_weight_sum.assign_add(weight)
        super()._backend_increment_gradient_accumulators(grads, acc_grads)  # type: ignore[misc]

    def _hvdtrain_take_weight(self) -> tf.Tensor | None:
        """Return the mean weight of the gradients that are applied now, and reset the sum."""
        weight_sum, weight = self._hvdtrain_weight_sum, self._hvdtrain_weighting.weight
        if weight is None or weight_sum is None:
            return weight
        total = tf.convert_to_tensor(weight_sum) + weight
        weight_sum.assign(tf.zeros_like(total))
        return total / float(self.gradient_accumulation_steps)  # type: ignore[attr-defined]


def _track_weights(optimizer: Any, dtype: str) -> None:
    """Make a plain optimizer sum up the weights of the gradients that it accumulates."""
    accumulates = optimizer.gradient_accumulation_steps
    weight_sum = keras.Variable(0.0, dtype=dtype, trainable=False) if accumulates else None
    set_untracked(optimizer, "_hvdtrain_weight_sum", weight_sum)


class GradientAveragingMixin(GradientWeightMixin):
    """Makes a plain optimizer average gradients over all ranks. It is saved as the plain class."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_missing: Sequence[Any]
    _hvdtrain_applied: Sequence[Any]
    _hvdtrain_averages: Sequence[Any] | None = None  # set while XLA compiles their application

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Average and apply gradients. XLA compiles what it can before and after the average."""
        plain = super().apply  # type: ignore[misc]
        if not self._hvdtrain_jit or not len(grads):
            plain(grads, trainable_variables)
            return
        variables = trainable_variables
        if not self.built:  # type: ignore[has-type]
            with keras.name_scope(self.name, caller=self):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        if variables is None:
            variables = self._trainable_variables  # type: ignore[attr-defined]
        grads, variables = self._filter_empty_gradients(grads, variables)
        grads, variables = self._overwrite_variables_directly_with_gradients(grads, variables)
        accumulates = self.gradient_accumulation_steps  # type: ignore[attr-defined]

        def update(*averages: Any) -> None:
            set_untracked(self, "_hvdtrain_averages", averages)
            try:
                plain(grads if accumulates else averages, variables)
            finally:
                set_untracked(self, "_hvdtrain_averages", None)

        averages = self._hvdtrain_averages_of(grads, variables)
        compiled_if_possible("the optimizer's update", update, *averages)

    def _hvdtrain_averages_of(self, grads: Any, variables: Sequence[Any]) -> Any:
        """Return the averages to apply; anything of their shapes in a step that accumulates."""
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        scale = self.loss_scale_factor  # type: ignore[attr-defined]
        if not steps:
            if scale is not None:
                grads = compiled_if_possible("loss scaling", lambda: [g / scale for g in grads])
            return self._hvdtrain_average(grads)
        sums = accumulators_of(self, variables)

        def means() -> list[tf.Tensor]:
            unscaled = grads if scale is None else [g / scale for g in grads]
            return [(g + a) / steps for g, a in zip(unscaled, sums)]

        def average() -> Any:
            return self._hvdtrain_average(compiled_if_possible("gradient accumulation", means))

        applies = tf.equal((iterations_of(self) + 1) % steps, 0)
        return tf.cond(applies, average, lambda: [tf.convert_to_tensor(g) for g in grads])

    def _filter_empty_gradients(self, grads: Any, vars: Any) -> Any:
        factor = self._hvdtrain_weighting.factor
        if self._hvdtrain_averages is None and factor is not None:
            plain = grads

            def weighted() -> list[Any]:
                return [g if g is None else scaled(g, factor) for g in plain]

            jit = self._hvdtrain_jit
            grads = compiled_if_possible("weights of losses", weighted) if jit else weighted()
        # Ranks must agree on the variables without gradients as well.
        missing = [variable for gradient, variable in zip(grads, vars) if gradient is None]
        set_untracked(self, "_hvdtrain_missing", missing)
        return super()._filter_empty_gradients(grads, vars)  # type: ignore[misc]

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        # The "gradients" of float8 scales are new scales, and the largest one fits all ranks.
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
        averages = self._hvdtrain_averages
        if averages is None:
            averages = self._hvdtrain_average(grads)
        return super()._clip_gradients(averages)  # type: ignore[misc]

    def _hvdtrain_average(self, grads: Sequence[Any]) -> Any:
        missing = self._hvdtrain_missing
        averages = self._hvdtrain_reducer.average(
            [*grads, *[None] * len(missing)],
            [*self._hvdtrain_applied, *missing],
            weight=self._hvdtrain_take_weight(),
            op=self._hvdtrain_weighting.op,
            add_rows=_is_linear(self),
        )
        return averages[: len(grads)]


class FiniteCheckMixin:
    """Makes a ``LossScaleOptimizer`` skip a step on all ranks after an overflow on one of them.

    A rank without rows is ignored, because its gradients will be multiplied by 0.
    """

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_jit = False

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks are finite."""
        check = super().check_finite  # type: ignore[misc]
        if self._hvdtrain_jit:
            finite = compiled_if_possible("the check for overflows", lambda: check(grads))
        else:
            finite = check(grads)
        factor = plain_optimizers(self)[0]._hvdtrain_weighting.factor
        if factor is not None:
            finite |= tf.equal(factor, 0.0)
        finite = tf.cast(finite, tf.int32)
        return tf.cast(self._hvdtrain_reducer.reduce(finite, "min", "finite gradients"), tf.bool)

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        handle = super()._stateful_handle_finite_grads  # type: ignore[misc]
        if not self._hvdtrain_jit:
            handle(grads, trainable_variables)
            return
        inner = self.inner_optimizer  # type: ignore[attr-defined]

        def unscale() -> Any:
            """Do all but apply the gradients, and return them."""
            unscaled: list[Any] = []
            set_untracked(inner, "apply", lambda grads, trainable_variables: unscaled.extend(grads))
            try:
                handle(grads, trainable_variables)
            finally:
                del vars(inner)["apply"]
            return unscaled

        inner.apply(compiled_if_possible("loss scaling", unscale), trainable_variables)


class WeightedStepsMixin(GradientWeightMixin):
    """Weights each of the accumulated steps by its samples."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients, or accumulate them multiplied by their weight."""
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_weight_sum is not None and weight is not None:
            grads = [g if g is None else scaled(g, weight) for g in grads]
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _hvdtrain_take_mean(self, grads: Any) -> tuple[tf.Tensor | None, Any]:
        """Return the weight and the weighted mean of the gradients that are applied now."""
        weight = self._hvdtrain_take_weight()
        if self._hvdtrain_weight_sum is not None and weight is not None:
            grads = [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in grads]
        return weight, grads


class LocalUpdateMixin(WeightedStepsMixin):
    """Makes a plain optimizer update weights with this rank's own gradients.

    It is saved as the plain class. Weights don't change in a step without samples on this rank.
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
    """Mix ``mixin`` into a plain optimizer whose updates use this rank's gradients."""
    mix_in(optimizer, mixin, reducer)
    _track_weights(optimizer, "float64")


def distribute_optimizer(optimizer: Any, reducer: GradientReducer) -> Any:
    """Make ``optimizer`` average its gradients, and return it.

    Its class is replaced by a subclass with the same name and module, so that the optimizer is
    saved and loaded as a plain one. A second call replaces only the reducer.

    Raises:
        ModelError: If it is not a Keras 3 optimizer, or if its inner optimizers don't exist yet.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"Expected a Keras 3 optimizer, got {type(optimizer).__name__}; replace optimizers of "
            "tf_keras or keras.optimizers.legacy with those of keras.optimizers."
        )
    check_inner_optimizers(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mix_in(optimizer, FiniteCheckMixin, reducer)
    for leaf in plain_optimizers(optimizer):
        mix_in(leaf, GradientAveragingMixin, reducer)
        if reducer.collectives.survives_losses:
            _track_weights(leaf, "float32")
    mark_distributed(optimizer, reducer)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Return whether the optimizer was distributed."""
    return hasattr(optimizer, _MARK)


@contextmanager
def weighting(optimizers: Sequence[Any], how: Weighting, jit: bool) -> Iterator[None]:
    """Apply gradients with this weighting within the block, compiled with XLA if ``jit``."""
    inner = [leaf for optimizer in optimizers for leaf in plain_optimizers(optimizer)]
    every = [*optimizers, *inner]
    for entry in every:
        set_untracked(entry, "_hvdtrain_weighting", how)
        set_untracked(entry, "_hvdtrain_jit", jit)
    try:
        yield
    finally:
        for entry in every:
            set_untracked(entry, "_hvdtrain_weighting", Weighting())
            set_untracked(entry, "_hvdtrain_jit", False)


def accumulates(optimizer: Any) -> bool:
    """Return whether gradients of several steps are applied together."""
    return any(leaf.gradient_accumulation_steps for leaf in plain_optimizers(optimizer))


def accumulator_variables(optimizer: Any) -> list[Any]:
    """Return a plain optimizer's variables that hold the gradients of earlier steps."""
    weight_sum = getattr(optimizer, "_hvdtrain_weight_sum", None)
    return [*accumulated_gradients(optimizer), *([] if weight_sum is None else [weight_sum])]


def plain_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that update weights.

    These are the ones in a ``LossScaleOptimizer`` or ``MultiOptimizer``, or the optimizer itself.
    """
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    return _inner_optimizers(outer) or [outer]


def mix_in(optimizer: Any, mixin: type, reducer: Any) -> None:
    """Make the optimizer's class a subclass of ``mixin`` with the same name.

    Methods of ``mixin`` find ``reducer`` as ``_hvdtrain_reducer``.
    """
    plain = type(optimizer)
    if not issubclass(plain, mixin):
        names = {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "_hvdtrain_plain_class": plain,
        }
        mixed = type(plain.__name__, (mixin, plain), names)
        register_as(mixed, plain)
        optimizer.__class__ = mixed
    mark_distributed(optimizer, reducer)


def _is_linear(optimizer: Any) -> bool:
    """Return whether updates with several rows for an index equal updates with their sum."""
    plain = getattr(type(optimizer), "_hvdtrain_plain_class", type(optimizer))
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    return plain is keras.optimizers.SGD and not clips


def remove_mixins(optimizer: Any) -> None:
    """Restore the plain classes of an optimizer and of its inner optimizers."""
    for entry in (optimizer, *plain_optimizers(optimizer)):
        entry.__class__ = getattr(type(entry), "_hvdtrain_plain_class", type(entry))


def mark_distributed(optimizer: Any, reducer: Any) -> None:
    """Mark an optimizer as distributed with this reducer."""
    set_untracked(optimizer, _MARK, reducer)


def check_inner_optimizers(optimizer: Any) -> None:
    """Check that the optimizers of a ``MultiOptimizer`` exist.

    Raises:
        ModelError: If they will only be created when the ``MultiOptimizer`` is built.
    """
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(outer, "optimizers", None) == []:
        raise ModelError(
            f"{type(outer).__name__} has no optimizers yet, because a function creates them when "
            "it is built. Call optimizer.build(model.trainable_variables) before you distribute it."
        )


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a ``MultiOptimizer``, or an empty list."""
    inner = getattr(optimizer, "optimizers", None)
    return list(inner) if isinstance(inner, (list, tuple)) else []
