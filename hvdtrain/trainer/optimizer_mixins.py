"""Optimizers that average gradients over all ranks just before they clip and apply them.

Gradients are averaged in ``_clip_gradients``. It is the only method of a Keras optimizer that runs
after gradient accumulation, and before clipping, weight decay and the update. K accumulated steps
therefore need only one reduction, and clipping applies to the average instead of each rank's
gradients.

On JAX, Keras calls the method in every step, and discards what it returns until K steps have been
accumulated. There, a branch in the compiled step skips the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np

from hvdtrain.frameworks.variable_names import variable_label
from hvdtrain.gradients.error_feedback import KeptArray
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import iterations_of, set_untracked

__all__ = ["FiniteCheckMixin", "GradientAveragingMixin", "GradientWeightMixin", "Weighting"]

Scalar = Any  # a number, or a scalar tensor of Keras' backend


class Weighting(NamedTuple):
    """How an optimizer combines the gradients of one step with those of other ranks and steps."""

    # A factor by which gradients are multiplied before they are accumulated. None means 1.
    factor: Scalar | None = None
    # The weight of this rank, by which its gradients were multiplied. If ranks are lost,
    # ``GradientReducer.average`` divides by the weights of the remaining ranks.
    weight: Scalar | None = None
    # how gradients are combined over the ranks: ``"average"`` or ``"sum"``
    op: Literal["average", "sum"] = "average"
    # The terms of the step's losses, which ``LossWeights.joint_loss`` yields. The list is filled
    # during the step on torch and JAX.
    terms: Sequence[Any] = ()

    @property
    def only(self) -> Any:
        """The term of the loss, or None if the model has several losses or a mean over rows."""
        return self.terms[0] if len(self.terms) == 1 else None

    @property
    def total_weight(self) -> Scalar | None:
        """The weight of this rank, including the factor f_r of a single loss."""
        if self.weight is None or self.only is None:
            return self.weight
        return self.weight * self.only.factor


class GradientWeightMixin:
    """Mixin with which an optimizer knows the weight of its gradients.

    If the optimizer accumulates gradients, ``track_weights`` must be called on it.
    """

    _hvdtrain_reducer: Any
    _hvdtrain_weighting = Weighting()
    # The sum of the weights of the accumulated gradients. A compiled step of JAX can't assign
    # variables that aren't part of the model's state, so the sum is an array on the host there.
    _hvdtrain_weight_sum: keras.Variable | KeptArray | None = None

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        self._hvdtrain_add_weight()
        super()._backend_increment_gradient_accumulators(grads, acc_grads)  # type: ignore[misc]

    def _hvdtrain_add_weight(self) -> None:
        """Add the weight of this step to the weight of the accumulated gradients."""
        weight_sum, weight = self._hvdtrain_weight_sum, self._hvdtrain_weighting.total_weight
        if weight_sum is None or weight is None:
            return
        if isinstance(weight_sum, KeptArray):

            def add(weight: np.ndarray) -> list[np.ndarray]:
                weight_sum.assign(weight_sum.value + weight)
                return []

            self._hvdtrain_reducer.framework.run_on_host(add, [weight], [])
        else:
            weight_sum.assign_add(weight)

    def _hvdtrain_take_weight(self) -> Scalar | None:
        """Return the mean weight of the gradients accumulated since the last update.

        The weights for the next update start from zero. Without gradient accumulation, this returns
        the weight of the current step.
        """
        weight_sum, weight = self._hvdtrain_weight_sum, self._hvdtrain_weighting.total_weight
        if weight is None or weight_sum is None:
            return weight
        steps = float(self.gradient_accumulation_steps)  # type: ignore[attr-defined]
        if isinstance(weight_sum, KeptArray):

            def take(weight: np.ndarray) -> list[np.ndarray]:
                total = weight_sum.value + weight
                weight_sum.assign(np.zeros_like(total))
                return [total / steps]

            return self._hvdtrain_reducer.framework.run_on_host(take, [weight], [()])[0]
        total = keras.ops.convert_to_tensor(weight_sum) + weight
        weight_sum.assign(keras.ops.zeros_like(total))
        return total / steps


class GradientAveragingMixin(GradientWeightMixin):
    """Mixin with which an optimizer averages its gradients. It is saved without the mixin."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_missing: Sequence[Any]
    _hvdtrain_applied: Sequence[Any]

    def _filter_empty_gradients(self, grads: Any, vars: Any) -> Any:
        factor, plain = self._hvdtrain_weighting.factor, grads
        if factor is not None:
            scaled = self._hvdtrain_reducer.framework.scaled
            grads = self._hvdtrain_compute(
                "weights of losses", lambda: [g if g is None else scaled(g, factor) for g in plain]
            )
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
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if steps and keras.backend.backend() == "jax":

            def accumulate() -> list[Any]:
                self._hvdtrain_add_weight()
                return list(grads)

            applies = keras.ops.equal((iterations_of(self) + 1) % steps, 0)
            averages = keras.ops.cond(applies, lambda: self._hvdtrain_average(grads), accumulate)
        else:
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

    def _hvdtrain_compute(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function without collectives. ``what`` names it. Subclasses may compile it."""
        return function()


class FiniteCheckMixin:
    """Mixin for a ``LossScaleOptimizer``: all ranks skip a step if one rank's gradients overflow.

    A rank without rows is ignored, because its gradients will be multiplied by 0.
    """

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_weighting = Weighting()

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks are finite."""
        check, ops = super().check_finite, keras.ops  # type: ignore[misc]
        finite = self._hvdtrain_compute("the check for overflows", lambda: check(grads))
        factor = self._hvdtrain_weighting.factor
        if factor is not None:
            finite = ops.logical_or(finite, ops.equal(factor, 0.0))
        finite = ops.cast(finite, "int32")
        return ops.cast(self._hvdtrain_reducer.reduce(finite, "min", "finite gradients"), "bool")

    def _hvdtrain_compute(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function without collectives. ``what`` names it. Subclasses may compile it."""
        return function()


def _is_linear(optimizer: Any) -> bool:
    """Return whether rows with the same index may be added up before the optimizer's update.

    In a sparse gradient, several rows may have the same index. The result is true if the update
    with these rows equals the update with their sum.
    """
    plain = getattr(type(optimizer), "_hvdtrain_plain_class", type(optimizer))
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    return plain is keras.optimizers.SGD and not clips
