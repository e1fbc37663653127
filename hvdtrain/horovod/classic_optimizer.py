"""Optimizers of ``tf.compat.v1.train`` that combine the gradients of all ranks.

In a session, eagerly, and in a tf.function, as far as those optimizers work there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.horovod.local_aggregation import Accumulation
from hvdtrain.horovod.reduce_ops import Average, ReduceOp, Sum, choose_op

__all__ = ["distribute_classic_optimizer", "is_classic"]

_Pairs = Sequence[tuple[Any, Any]]


class _CombinesGradients:
    """Mixed into the class of a plain optimizer."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_accumulation: Accumulation | None
    _hvdtrain_has_combined: bool

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_reducer.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the plain optimizer's, combined over all ranks.

        Before the last of several steps that are accumulated, it is the sums so far of this rank
        alone, which ``apply_gradients`` leaves aside.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        gradients, variables = map(list, zip(*pairs))

        def combine(summed: Sequence[Any]) -> list[Any]:
            return self._hvdtrain_reducer.average(summed, variables)

        accumulation = self._hvdtrain_accumulation
        combined = (
            combine(gradients) if accumulation is None else accumulation.add(gradients, combine)
        )
        self._hvdtrain_has_combined = True
        return list(zip(combined, variables))

    def apply_gradients(
        self, grads_and_vars: _Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As the plain optimizer's; ``global_step`` counts steps that are accumulated, too.

        Raises:
            ModelError: The gradients come from elsewhere than ``compute_gradients``.
        """
        if not self._hvdtrain_has_combined:
            raise ModelError(
                "apply_gradients received gradients that compute_gradients of this optimizer has "
                "not computed, so they may be those of one rank. Call compute_gradients instead of "
                "tf.gradients; or combine them with a DistributedGradientTape or allreduce, and "
                "leave DistributedOptimizer out."
            )
        pairs = list(grads_and_vars)
        apply: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        if self._hvdtrain_accumulation is None:
            return apply(pairs, global_step, name)
        return self._hvdtrain_accumulation.when_complete(
            [gradient for gradient, _ in pairs if gradient is not None],
            lambda: apply(pairs, None, name),
            global_step,
        )


def is_classic(optimizer: Any) -> bool:
    """Whether it is of ``tf.compat.v1.train``."""
    return isinstance(optimizer, tf.compat.v1.train.Optimizer)


def distribute_classic_optimizer(
    optimizer: Any,
    reducer: GradientReducer,
    *,
    op: ReduceOp,
    passes: int,
    averages: bool,
    as_dense: bool,
) -> Any:
    """Let ``compute_gradients``, and with it ``minimize``, combine those of all ranks.

    Args:
        optimizer: One of ``tf.compat.v1.train``; its class becomes a subclass of the same name.
        reducer: Combines them.
        op: How they are combined: by Average or Sum.
        passes: Add up the gradients of so many steps first, and apply those.
        averages: Take their mean instead.
        as_dense: Make tensors of ``tf.IndexedSlices`` that are added up.

    Returns:
        The same optimizer.

    Raises:
        ValueError: What was asked for does not fit together.
    """
    op = choose_op(op)
    if op not in (Average, Sum):
        raise ValueError(f"Received op={op.name}; expected Average or Sum.")
    if passes < 1:
        raise ValueError(f"Received backward_passes_per_step={passes}; expected 1 or more.")
    plain = type(optimizer)
    if not issubclass(plain, _CombinesGradients):
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        optimizer.__class__ = type(plain.__name__, (_CombinesGradients, plain), names)
    optimizer._hvdtrain_reducer = reducer
    optimizer._hvdtrain_accumulation = (
        None if passes == 1 else Accumulation(passes, averages=averages, as_dense=as_dense)
    )
    optimizer._hvdtrain_has_combined = False
    return optimizer
