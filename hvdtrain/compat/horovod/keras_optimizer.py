"""Horovod's distributed optimizers for Keras.

New programs should use ``hvdtrain.DistributedOptimizer``, which checks more between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.compat.horovod.compression import Compression, Compressor
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.reducer_arguments import make_reducer, trainable_weights
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, Sum
from hvdtrain.errors import ModelError
from hvdtrain.gradients.buckets import Groups
from hvdtrain.gradients.mode import check_mode
from hvdtrain.trainer.optimizer_mixins import FiniteCheckMixin, GradientAveragingMixin
from hvdtrain.trainer.optimizer_patch import (
    check_inner_optimizers,
    mix_in,
    plain_optimizers,
)

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]


class _HorovodOptimizer(GradientAveragingMixin):
    """Mixin with which an optimizer reduces its gradients. It is saved without the mixin."""

    _hvdtrain_sums = False

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the reduction, so that each rank uses its own gradient."""
        self._hvdtrain_reducer.keep_local(var)

    def _hvdtrain_average(self, grads: Any) -> Any:
        # Keras passes the mean of the accumulated gradients, so multiply it to get their sum.
        if self._hvdtrain_sums:
            grads = [gradient * self.gradient_accumulation_steps for gradient in grads]  # type: ignore[attr-defined]
        return super()._hvdtrain_average(grads)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before it clips and applies them.

    Args:
        optimizer: Keras 3 optimizer, which is modified and returned.
        name: Ignored.
        device_dense: Device on which gradients are reduced.
        device_sparse: Device on which gradients that are ``tf.IndexedSlices`` are combined.
        compression: Data type in which gradients are sent, such as ``Compression.fp16``.
        sparse_as_dense: Whether to convert ``tf.IndexedSlices`` to tensors before they are reduced.
        gradient_predivide_factor: With Average, gradients are divided by this factor before they
            are summed, and the sum is divided by ``size() / factor``.
        op: Average or Sum.
        backward_passes_per_step: Number of steps whose gradients are summed before the reduction.
        average_aggregated_gradients: Whether to average the gradients of these steps instead of
            summing them.
        num_groups: Deprecated. Use ``groups`` instead.
        groups: Number of groups in which gradients are reduced, or a list with the variables of
            each group. By default, hvdtrain chooses the groups.
        process_set: Participating ranks. Defaults to all ranks.
        scale_local_gradients: Whether to divide the gradients of local variables by the number of
            ranks. A variable is local after ``register_local_var``.

    Returns:
        The same optimizer. It is saved and loaded like a plain optimizer.

    Raises:
        ModelError: If ``optimizer`` is not a Keras 3 optimizer, or if it already accumulates
            gradients. Also if some ranks are parameter servers.
        ValueError: If the arguments contradict each other.
    """
    arguments = locals()
    check_mode("keras.DistributedOptimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}; import "
            "it from keras.optimizers, not tf_keras, tf.compat.v1.train or keras.optimizers.legacy."
        )
    reducer = make_reducer(arguments, ops=(Average, Sum))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mix_in(optimizer, FiniteCheckMixin, reducer)
    check_inner_optimizers(optimizer)
    accumulates = backward_passes_per_step > 1
    sums = accumulates and not average_aggregated_gradients
    for plain in plain_optimizers(optimizer):
        if accumulates:
            steps = plain.gradient_accumulation_steps
            if plain.built or steps:
                raise ModelError(
                    f"backward_passes_per_step={backward_passes_per_step} requires a new "
                    f"optimizer, got one that was used or has gradient_accumulation_steps={steps}."
                )
            plain.gradient_accumulation_steps = backward_passes_per_step
        mix_in(plain, _HorovodOptimizer, reducer)
        object.__setattr__(plain, "_hvdtrain_sums", sums)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce all gradients except those of ``local_layers``.

    The layers in ``local_layers`` must be built. The other arguments are described in
    ``DistributedOptimizer``.

    Raises:
        ModelError: In the same cases in which ``DistributedOptimizer`` raises it.
        ValueError: If ``local_layers`` contains something other than layers, or the arguments
            contradict each other.
    """
    arguments = locals()
    local_variables = trainable_weights(arguments.pop("local_layers"))
    DistributedOptimizer(**arguments)
    for plain in plain_optimizers(optimizer):
        for variable in local_variables:
            plain.register_local_var(variable)
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model, and make its optimizer reduce gradients over all ranks.

    Args:
        filepath: Path of the saved model.
        custom_optimizers: Optimizer classes that are unknown to Keras.
        custom_objects: Other objects that are unknown to Keras, as a dictionary from names to
            objects.
        compression: Data type in which gradients are sent, such as ``Compression.fp16``.
        legacy_opts: Must be False.

    Raises:
        ModelError: If ``legacy_opts`` is True.
    """
    if legacy_opts:
        raise ModelError("legacy_opts must be False, got True: Keras 3 removed legacy optimizers.")
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.compiled:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
