"""Optimizers that average gradients in a model that ``torch.compile`` compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.private_api.keras import set_untracked
from hvdtrain.trainer.optimizer_mixins import FiniteCheckMixin, GradientAveragingMixin

__all__ = ["CompiledUpdateMixin", "UncompiledFiniteCheckMixin"]


class _UncompiledMixin:
    """Mixin for an optimizer that a compiled step calls as a function that isn't compiled.

    ``torch.compile`` can't compile the reduction. It would divide each of the nested functions that
    call the reduction, and trace all of them again for each part.
    """

    @torch.compiler.disable
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients, as Keras does."""
        super().apply(grads, trainable_variables)  # type: ignore[misc]


class CompiledUpdateMixin(_UncompiledMixin, GradientAveragingMixin):
    """Mixin with which an optimizer averages its gradients and then runs a compiled update.

    Without ``jit_compile``, it works like ``GradientAveragingMixin``.
    """

    _hvdtrain_jit = False
    _hvdtrain_update: Callable[..., None] | None = None  # the compiled update

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        update = super()._backend_update_step  # type: ignore[misc]
        if self._hvdtrain_jit:
            if self._hvdtrain_update is None:
                set_untracked(self, "_hvdtrain_update", torch.compile(update))
            update = self._hvdtrain_update
        update(grads, variables, learning_rate)


class UncompiledFiniteCheckMixin(_UncompiledMixin, FiniteCheckMixin):
    """Mixin for a ``LossScaleOptimizer`` that a compiled step calls."""
