"""Functions that change a Keras optimizer so that it works in a job with several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.gradients.error_feedback import KeptArray
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import (
    accumulated_gradients,
    register_as,
    set_untracked,
)
from hvdtrain.trainer.optimizer_mixins import FiniteCheckMixin, GradientAveragingMixin, Weighting

__all__ = [
    "accumulates",
    "accumulator_variables",
    "check_inner_optimizers",
    "distribute_optimizer",
    "is_distributed",
    "mark_distributed",
    "mix_in",
    "plain_optimizers",
    "remove_mixins",
    "track_weights",
    "weighting",
]

_MARK = "_hvdtrain_reducer"


def distribute_optimizer(optimizer: Any, reducer: GradientReducer) -> Any:
    """Make ``optimizer`` average its gradients over all ranks, and return it.

    The class of the optimizer is replaced by a subclass with the same name and module. The
    optimizer is therefore saved and loaded like an optimizer that was not changed. A second call
    replaces only the reducer.

    Raises:
        ModelError: If ``optimizer`` is not a Keras 3 optimizer, or if its inner optimizers don't
            exist yet.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"Expected a Keras 3 optimizer, got {type(optimizer).__name__}; replace optimizers of "
            "tf_keras or keras.optimizers.legacy with those of keras.optimizers."
        )
    check_inner_optimizers(optimizer)
    averages, checks = _mixins()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mix_in(optimizer, checks, reducer)
    for leaf in plain_optimizers(optimizer):
        mix_in(leaf, averages, reducer)
        if reducer.collectives.survives_losses:
            track_weights(leaf, "float32")
    mark_distributed(optimizer, reducer)
    return optimizer


def _mixins() -> tuple[type[GradientAveragingMixin], type[FiniteCheckMixin]]:
    """Return the mixins for Keras' backend."""
    if keras.backend.backend() == "jax":
        return GradientAveragingMixin, FiniteCheckMixin
    if keras.backend.backend() == "torch":
        from hvdtrain.trainer.backends.torch.compiled_optimizer import (
            CompiledUpdateMixin,
            UncompiledFiniteCheckMixin,
        )

        return CompiledUpdateMixin, UncompiledFiniteCheckMixin
    from hvdtrain.trainer.backends.tensorflow.compiled_optimizer import (
        CompiledAveragingMixin,
        CompiledFiniteCheckMixin,
    )

    return CompiledAveragingMixin, CompiledFiniteCheckMixin


def track_weights(optimizer: Any, dtype: str) -> None:
    """Make an optimizer with a ``GradientWeightMixin`` add up the weights of accumulated steps."""
    weight_sum: Any = None
    if optimizer.gradient_accumulation_steps:
        on_host = keras.backend.backend() == "jax"
        weight_sum = KeptArray(()) if on_host else keras.Variable(0.0, dtype=dtype, trainable=False)
    set_untracked(optimizer, "_hvdtrain_weight_sum", weight_sum)


def is_distributed(optimizer: Any) -> bool:
    """Return whether ``distribute_optimizer`` or a similar function has changed the optimizer."""
    return hasattr(optimizer, _MARK)


@contextmanager
def weighting(optimizers: Sequence[Any], how: Weighting, jit: bool) -> Iterator[None]:
    """Use this ``Weighting`` for the gradients that optimizers apply in the ``with`` block.

    If ``jit`` is true, the optimizers' computations are compiled on TensorFlow and torch.
    """
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
    """Return whether the optimizer accumulates the gradients of several steps."""
    return any(leaf.gradient_accumulation_steps for leaf in plain_optimizers(optimizer))


def accumulator_variables(optimizer: Any) -> list[Any]:
    """Return the variables in which an optimizer accumulates the gradients of earlier steps."""
    weight_sum = getattr(optimizer, "_hvdtrain_weight_sum", None)
    return [*accumulated_gradients(optimizer), *([] if weight_sum is None else [weight_sum])]


def plain_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that update weights.

    For a ``LossScaleOptimizer`` or ``MultiOptimizer``, these are the optimizers inside it. For any
    other optimizer, the result contains the optimizer itself.
    """
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    return _inner_optimizers(outer) or [outer]


def mix_in(optimizer: Any, mixin: type, reducer: Any) -> None:
    """Add ``mixin`` to the class of an optimizer, without changing the name of the class.

    Methods of ``mixin`` can use ``reducer`` as the attribute ``_hvdtrain_reducer``.
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


def remove_mixins(optimizer: Any) -> None:
    """Restore the original classes of an optimizer and of its inner optimizers."""
    for entry in (optimizer, *plain_optimizers(optimizer)):
        entry.__class__ = getattr(type(entry), "_hvdtrain_plain_class", type(entry))


def mark_distributed(optimizer: Any, reducer: Any) -> None:
    """Store that an optimizer was changed to use this reducer."""
    set_untracked(optimizer, _MARK, reducer)


def check_inner_optimizers(optimizer: Any) -> None:
    """Check that the optimizers of a ``MultiOptimizer`` exist.

    Raises:
        ModelError: If the optimizers don't exist yet, because the ``MultiOptimizer`` is not built.
    """
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(outer, "optimizers", None) == []:
        raise ModelError(
            f"{type(outer).__name__} has no optimizers yet, because a function creates them when "
            "it is built. Call optimizer.build(model.trainable_variables) before you distribute it."
        )


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a ``MultiOptimizer``; empty for others."""
    inner = getattr(optimizer, "optimizers", None)
    return list(inner) if isinstance(inner, (list, tuple)) else []
