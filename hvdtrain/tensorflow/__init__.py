"""Collectives inside TensorFlow's graphs, and Horovod's API for TensorFlow.

::

    import hvdtrain.tensorflow as hvd

A module is loaded when the program first uses one of its names.
"""

from __future__ import annotations

from hvdtrain.lazy import lazy_names

BUILD_INFO = (
    "ccl_built",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
)

_TENSORFLOW_INFO = ("cuda_built", "nccl_built", "rocm_built")

WORLD_NAMES = (
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
)

COMMON_NAMES = {
    "hvdtrain.world": WORLD_NAMES,
    "hvdtrain.compat.horovod.build_info": BUILD_INFO,
    "hvdtrain.compat.horovod.tensorflow_info": _TENSORFLOW_INFO,
    "hvdtrain.compat.horovod.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "init",
        "remove_process_set",
    ),
    "hvdtrain.gradients.compression": ("Compression",),
}
"""Names that ``hvdtrain.keras`` shares with this module, by the module that defines them."""

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **COMMON_NAMES,
        "hvdtrain.compat.horovod.build_info": (*BUILD_INFO, "is_homogeneous"),
        "hvdtrain.compat.horovod.tensorflow_info": (
            *_TENSORFLOW_INFO,
            "local_rank_op",
            "local_size_op",
            "process_set_included_op",
            "rank_op",
            "size_op",
        ),
        "hvdtrain.compat.horovod.reduction_arguments": (
            "Adasum",
            "Average",
            "Max",
            "Min",
            "Product",
            "Sum",
        ),
        "hvdtrain.compat.horovod.collective_ops": (
            "allgather",
            "allreduce",
            "alltoall",
            "broadcast",
            "broadcast_",
            "grouped_allgather",
            "grouped_allreduce",
            "grouped_reducescatter",
            "join",
            "reducescatter",
        ),
        "hvdtrain.compat.horovod.gradient_tape": (
            "DistributedGradientTape",
            "PartialDistributedGradientTape",
        ),
        "hvdtrain.trainer.batch_normalization": ("SyncBatchNormalization",),
        "hvdtrain.compat.horovod.tensorflow_optimizer": ("DistributedOptimizer",),
        "hvdtrain.compat.horovod.broadcast": (
            "BroadcastGlobalVariablesHook",
            "allgather_object",
            "broadcast_global_variables",
            "broadcast_object",
            "broadcast_object_fn",
            "broadcast_variables",
        ),
    },
    submodules=("elastic", "keras"),
)
