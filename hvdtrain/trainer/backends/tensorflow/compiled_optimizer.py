"""Optimizers that average gradients in a model with ``jit_compile``.

XLA can't compile the reduction. Therefore the reduction runs before Keras' ``apply``, and
``apply`` is compiled as a whole. Its call of ``_clip_gradients`` returns the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.xla import compiled_if_possible
from hvdtrain.private_api.keras import accumulators_of, iterations_of, set_untracked
from hvdtrain.trainer.optimizer_mixins import FiniteCheckMixin, GradientAveragingMixin

__all__ = ["CompiledAveragingMixin", "CompiledFiniteCheckMixin"]


class _ComputationsMixin:
    """Mixin that compiles computations if the attribute ``_hvdtrain_jit`` is true."""

    _hvdtrain_jit = False

    def _hvdtrain_compute(self, what: str, function: Callable[[], Any]) -> Any:
        return compiled_if_possible(what, function) if self._hvdtrain_jit else function()


class CompiledAveragingMixin(_ComputationsMixin, GradientAveragingMixin):
    """Mixin with which an optimizer averages its gradients between computations that XLA compiles.

    Without ``jit_compile``, it works like ``GradientAveragingMixin``.
    """

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
            weighting = self._hvdtrain_weighting
            set_untracked(self, "_hvdtrain_averages", averages)
            set_untracked(self, "_hvdtrain_weighting", weighting._replace(factor=None))
            try:
                plain(grads if accumulates else averages, variables)
            finally:
                set_untracked(self, "_hvdtrain_averages", None)
                set_untracked(self, "_hvdtrain_weighting", weighting)

        averages = self._hvdtrain_averages_of(grads, variables)
        compiled_if_possible("the optimizer's update", update, *averages)

    def _hvdtrain_averages_of(self, grads: Any, variables: Sequence[Any]) -> Any:
        """Return averages to apply, or unused tensors in a step that accumulates."""
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

    def _hvdtrain_average(self, grads: Sequence[Any]) -> Any:
        if self._hvdtrain_averages is not None:
            return self._hvdtrain_averages
        return super()._hvdtrain_average(grads)


class CompiledFiniteCheckMixin(_ComputationsMixin, FiniteCheckMixin):
    """Mixin for a ``LossScaleOptimizer`` in which XLA compiles the computations.

    Without ``jit_compile``, it works like ``FiniteCheckMixin``.
    """

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
