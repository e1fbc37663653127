"""Collectives inside TensorFlow's graphs, and Horovod's names for them.

::

    import hvdtrain.tensorflow as hvd

Names are loaded when they are first used.
"""

from __future__ import annotations

from hvdtrain.lazy import lazy_names

OF_JOB = {
    "hvdtrain.world": (
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
        "start_timeline",
        "stop_timeline",
    ),
    "hvdtrain.horovod.build_info": (
        "ccl_built",
        "cross_rank",
        "cross_size",
        "cuda_built",
        "ddl_built",
        "gloo_built",
        "gloo_enabled",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rocm_built",
    ),
    "hvdtrain.horovod.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "init",
        "remove_process_set",
    ),
    "hvdtrain.horovod.op_constants": ("Average", "Sum"),
    "hvdtrain.gradients.compression": ("Compression",),
}
"""The names that the modules for Keras have as well."""

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **OF_JOB,
        "hvdtrain.horovod.build_info": (
            *OF_JOB["hvdtrain.horovod.build_info"],
            "is_homogeneous",
            "local_rank_op",
            "local_size_op",
            "process_set_included_op",
            "rank_op",
            "size_op",
        ),
        "hvdtrain.horovod.op_constants": ("Adasum", "Average", "Max", "Min", "Product", "Sum"),
        "hvdtrain.horovod.exchange_ops": (
            "allgather",
            "alltoall",
            "broadcast",
            "broadcast_",
            "grouped_allgather",
        ),
        "hvdtrain.horovod.reduction_ops": (
            "allreduce",
            "grouped_allreduce",
            "grouped_reducescatter",
            "join",
            "reducescatter",
        ),
        "hvdtrain.horovod.gradient_tape": (
            "DistributedGradientTape",
            "PartialDistributedGradientTape",
        ),
        "hvdtrain.keras.batch_normalization": ("SyncBatchNormalization",),
        "hvdtrain.horovod.tensorflow_optimizer": ("DistributedOptimizer",),
        "hvdtrain.horovod.broadcast": (
            "allgather_object",
            "broadcast_object",
            "broadcast_object_fn",
            "broadcast_variables",
            "broadcast_global_variables",
            "BroadcastGlobalVariablesHook",
        ),
    },
    submodules=("elastic", "keras"),
)
