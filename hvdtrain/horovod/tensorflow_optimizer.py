"""``DistributedOptimizer`` with the arguments that ``horovod.tensorflow`` gives it."""

from __future__ import annotations

from typing import Any

from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.tape import check_averages
from hvdtrain.horovod import keras_optimizer
from hvdtrain.horovod.classic_optimizer import distribute_classic_optimizer, is_classic
from hvdtrain.horovod.gradient_reduction import GradientReduction, Groups
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reduce_ops import Average, ReduceOp

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
    """As ``hvdtrain.keras.DistributedOptimizer``, whose arguments have another order.

    Args:
        optimizer: Of Keras 3, or of ``tf.compat.v1.train``: that one combines gradients in
            ``compute_gradients`` and ``minimize``.
        name: See there.
        use_locking: Of no effect.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        backward_passes_per_step: See there.
        op: See there.
        gradient_predivide_factor: See there.
        average_aggregated_gradients: See there.
        num_groups: See there.
        groups: See there.
        process_set: See there.
        scale_local_gradients: See there.
    """
    if is_classic(optimizer):
        check_averages("tensorflow.DistributedOptimizer")
        reduction = GradientReduction(
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups if groups is not None else num_groups or None,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
        return distribute_classic_optimizer(
            optimizer,
            reduction,
            passes=backward_passes_per_step,
            averages=average_aggregated_gradients,
        )
    return keras_optimizer.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
