"""Optimizers that average gradients over all ranks just before they clip and apply them.

Gradients are averaged in ``_clip_gradients``. It is the only method of a Keras optimizer that runs
after gradient accumulation, and before clipping, weight decay and the update. K accumulated steps
therefore need only one reduction, and clipping applies to the average instead of each rank's
gradients.

XLA can't compile the reduction. With ``jit_compile``, the reduction therefore runs before Keras'
``apply``. ``apply`` is compiled as a whole, and its call of ``_clip_gradients`` returns the
averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.tensors import scaled
from hvdtrain.frameworks.tensorflow.xla import compiled_if_possible
from hvdtrain.frameworks.variable_names import variable_label
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import accumulators_of, iterations_of, set_untracked

__all__ = ["FiniteCheckMixin", "GradientAveragingMixin", "GradientWeightMixin", "Weighting"]


class Weighting(NamedTuple):
    """How an optimizer combines the gradients of one step with those of other ranks and steps.

    Attributes:
        factor: A factor by which gradients are multiplied before they are accumulated. None means
            1.
        weight: The weight of this rank, by which its gradients were multiplied. If ranks are lost,
            ``GradientReducer.average`` divides by the weights of the remaining ranks.
        op: How gradients are combined over the ranks: ``"average"`` or ``"sum"``.
    """

    factor: tf.Tensor | None = None
    weight: tf.Tensor | None = None
    op: Literal["average", "sum"] = "average"


class GradientWeightMixin:
    """Mixin with which an optimizer knows the weight of its gradients.

    If the optimizer accumulates gradients, ``_track_weights`` must be called on it.
    """

    _hvdtrain_weighting = Weighting()
    _hvdtrain_jit = False
    _hvdtrain_weight_sum: keras.Variable | None = None  # of the accumulated gradients

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        weight = self._hvdtrain_weighting.weight
        if self._hvdtrain_weight_sum is not None and weight is not None:
            self._hvdtrain_weight_sum.assign_add(weight)
        super()._backend_increment_gradient_accumulators(grads, acc_grads)  # type: ignore[misc]

    def _hvdtrain_take_weight(self) -> tf.Tensor | None:
        """Return the mean weight of the gradients accumulated since the last update.

        The weights for the next update start from zero. Without gradient accumulation, this returns
        the weight of the current step.
        """
        weight_sum, weight = self._hvdtrain_weight_sum, self._hvdtrain_weighting.weight
        if weight is None or weight_sum is None:
            return weight
        total = tf.convert_to_tensor(weight_sum) + weight
        weight_sum.assign(tf.zeros_like(total))
        return total / float(self.gradient_accumulation_steps)  # type: ignore[attr-defined]


class GradientAveragingMixin(GradientWeightMixin):
    """Mixin with which an optimizer averages its gradients over all ranks.

    The optimizer is saved under its original class, without the mixin.
    """

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_missing: Sequence[Any]
    _hvdtrain_applied: Sequence[Any]
    _hvdtrain_averages: Sequence[Any] | None = None  # set while XLA compiles their application

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Average gradients over all ranks, then apply the averages.

        If the model uses ``jit_compile``, the computations before and after the average are
        compiled with XLA.
        """
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
        """Return the averaged gradients to apply.

        In a step that only accumulates gradients, return tensors of the same shapes, which are not
        used.
        """
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
    """Mixin for a ``LossScaleOptimizer``: all ranks skip a step if one rank's gradients overflow.

    A rank without rows is ignored, because its gradients will be multiplied by 0.
    """

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_weighting = Weighting()
    _hvdtrain_jit = False

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks are finite."""
        check = super().check_finite  # type: ignore[misc]
        if self._hvdtrain_jit:
            finite = compiled_if_possible("the check for overflows", lambda: check(grads))
        else:
            finite = check(grads)
        factor = self._hvdtrain_weighting.factor
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
            """Do everything except applying the gradients, and return the gradients."""
            unscaled: list[Any] = []
            set_untracked(inner, "apply", lambda grads, trainable_variables: unscaled.extend(grads))
            try:
                handle(grads, trainable_variables)
            finally:
                del vars(inner)["apply"]
            return unscaled

        inner.apply(compiled_if_possible("loss scaling", unscale), trainable_variables)


def _is_linear(optimizer: Any) -> bool:
    """Return whether rows with the same index may be added up before the optimizer's update.

    In a sparse gradient, several rows may have the same index. The result is true if the update
    with these rows equals the update with their sum.
    """
    plain = getattr(type(optimizer), "_hvdtrain_plain_class", type(optimizer))
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    return plain is keras.optimizers.SGD and not clips
