"""``DistributedOptimizer`` with the arguments that ``horovod.tensorflow`` gives it.

Optimizers of ``tf.compat.v1.train`` combine gradients in a session, eagerly, and in a tf.function,
as far as they work there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import Groups
from hvdtrain.gradients.tape import check_mode
from hvdtrain.horovod import keras_optimizer
from hvdtrain.horovod.local_aggregation import Accumulation
from hvdtrain.horovod.op_constants import Average, ReduceOp
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reducer_arguments import optimizer_reducer
from hvdtrain.keras.optimizer_patch import mix_in

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let an optimizer combine the gradients of all ranks before it clips and applies them.

    Args:
        optimizer: One of Keras 3, or of ``tf.compat.v1.train``: that one combines gradients in
            ``compute_gradients``, and with it in ``minimize``.
        use_locking: Has no effect.

    All other arguments are those of ``hvdtrain.keras.DistributedOptimizer``.

    Returns:
        The same optimizer.

    Raises:
        ModelError: As for ``hvdtrain.keras.DistributedOptimizer``.
        ValueError: What was asked for does not fit together.
    """
    arguments = locals()
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        del arguments["use_locking"]
        return keras_optimizer.DistributedOptimizer(**arguments)
    check_mode("tensorflow.DistributedOptimizer")
    reducer = optimizer_reducer(arguments)
    passes = backward_passes_per_step
    if passes < 1:
        raise ValueError(f"Received backward_passes_per_step={passes}; expected 1 or more.")
    mix_in(optimizer, _CombinesGradients, reducer)
    optimizer._hvdtrain_accumulation = None
    if passes > 1:
        optimizer._hvdtrain_accumulation = Accumulation(
            passes, averages=average_aggregated_gradients, as_dense=sparse_as_dense
        )
    optimizer._hvdtrain_has_combined = False
    return optimizer


class _CombinesGradients:
    """A mixin for the class of a plain optimizer: combines the gradients of all ranks."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_accumulation: Accumulation | None
    _hvdtrain_has_combined: bool

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_reducer.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute what the plain optimizer does, combined over all ranks.

        Before the last of several steps that are accumulated, it is the sums so far of this rank
        alone, which ``apply_gradients`` leaves aside.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        gradients, variables = map(list, zip(*pairs))

        def combine(summed: Sequence[Any]) -> list[Any]:
            return self._hvdtrain_reducer.average(summed, variables)

        if self._hvdtrain_accumulation is None:
            combined = combine(gradients)
        else:
            combined = self._hvdtrain_accumulation.add(gradients, combine)
        self._hvdtrain_has_combined = True
        return list(zip(combined, variables))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Apply gradients; ``global_step`` counts steps that are accumulated, too.

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
