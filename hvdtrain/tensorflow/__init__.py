"""Collectives inside TensorFlow's graphs, and Horovod's names for them.

::

    import hvdtrain.tensorflow as hvd

Names are loaded when they are first used.
"""

from __future__ import annotations

from hvdtrain.lazy import lazy_names

OF_JOB = {
    "hvdtrain.tensorflow.start": ("init",),
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
    "hvdtrain.tensorflow.queries": (
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
    "hvdtrain.tensorflow.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    ),
    "hvdtrain.tensorflow.reductions": ("Average", "Sum"),
    "hvdtrain.tensorflow.compression": ("Compression",),
}
"""What the modules for Keras have as well."""

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **OF_JOB,
        "hvdtrain.tensorflow.queries": (
            *OF_JOB["hvdtrain.tensorflow.queries"],
            "is_homogeneous",
            "local_rank_op",
            "local_size_op",
            "process_set_included_op",
            "rank_op",
            "size_op",
        ),
        "hvdtrain.tensorflow.reductions": (
            "Adasum",
            "Average",
            "Max",
            "Min",
            "Product",
            "Sum",
        ),
        "hvdtrain.tensorflow.operations": (
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
        "hvdtrain.tensorflow.tapes": (
            "DistributedGradientTape",
            "PartialDistributedGradientTape",
        ),
        "hvdtrain.keras.batch_normalization": ("SyncBatchNormalization",),
        "hvdtrain.keras.of_tensorflow": ("DistributedOptimizer",),
        "hvdtrain.tensorflow.exchange": (
            "allgather_object",
            "broadcast_object",
            "broadcast_object_fn",
            "broadcast_variables",
        ),
        "hvdtrain.tensorflow.global_variables": (
            "BroadcastGlobalVariablesHook",
            "broadcast_global_variables",
        ),
    },
    submodules=("elastic", "keras"),
)
