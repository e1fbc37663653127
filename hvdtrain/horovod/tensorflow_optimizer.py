"""``DistributedOptimizer`` with the arguments that ``horovod.tensorflow`` gives it."""

from __future__ import annotations

from typing import Any

from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.options import Groups
from hvdtrain.gradients.tape import check_averages
from hvdtrain.horovod import keras_optimizer
from hvdtrain.horovod.classic_optimizer import distribute_classic_optimizer, is_classic
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reduce_ops import Average, ReduceOp
from hvdtrain.horovod.reducer import reducer_for

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
    """``hvdtrain.keras.DistributedOptimizer``, whose arguments have another order.

    Args:
        optimizer: One of Keras 3, or of ``tf.compat.v1.train``: that one combines gradients in
            ``compute_gradients`` and ``minimize``.
        name: Has no effect.
        use_locking: Has no effect.
        device_dense: Where combined gradients are to be.
        device_sparse: Where combined gradients are to be that are ``tf.IndexedSlices``.
        compression: The type in which gradients travel; one of ``Compression``.
        sparse_as_dense: Make tensors of ``tf.IndexedSlices`` first.
        backward_passes_per_step: Add up the gradients of so many steps first.
        op: Average or Sum.
        gradient_predivide_factor: With Average, divide by so much before summing, and by the rest
            of the number of ranks afterwards.
        average_aggregated_gradients: Take the mean of the gradients of several steps instead.
        num_groups: The older name of ``groups``.
        groups: Combine gradients in so many groups, or those of each list of variables together;
            None for all at once.
        process_set: The ranks that take part; all of them if not given.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.

    Returns:
        The same optimizer.

    Raises:
        ModelError: As for ``hvdtrain.keras.DistributedOptimizer``.
        ValueError: What was asked for does not fit together.
    """
    arguments = locals()
    if not is_classic(optimizer):
        del arguments["use_locking"]
        return keras_optimizer.DistributedOptimizer(**arguments)
    check_averages("tensorflow.DistributedOptimizer")
    return distribute_classic_optimizer(
        optimizer,
        reducer_for(arguments),
        op=op,
        passes=backward_passes_per_step,
        averages=average_aggregated_gradients,
        as_dense=sparse_as_dense,
    )
