"""The names of Horovod's API for each framework, by the module that defines them.

``hvdtrain.tensorflow``, ``hvdtrain.keras`` and ``hvdtrain.torch`` offer them, and load a module
when the program first uses one of its names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["KERAS", "TENSORFLOW", "TORCH"]

_BUILD_INFO = (
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

_REDUCTIONS = ("Adasum", "Average", "Max", "Min", "Product", "Sum")

_WORLD = (
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
)

_COMMON = {
    "hvdtrain.world": _WORLD,
    "hvdtrain.compat.horovod.build_info": _BUILD_INFO,
    "hvdtrain.compat.horovod.tensorflow_info": _TENSORFLOW_INFO,
    "hvdtrain.compat.horovod.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "init",
        "remove_process_set",
    ),
    "hvdtrain.compat.horovod.compression": ("Compression",),
}

TENSORFLOW: Mapping[str, Sequence[str]] = {
    **_COMMON,
    "hvdtrain.compat.horovod.build_info": (*_BUILD_INFO, "is_homogeneous"),
    "hvdtrain.compat.horovod.tensorflow_info": (
        *_TENSORFLOW_INFO,
        "local_rank_op",
        "local_size_op",
        "process_set_included_op",
        "rank_op",
        "size_op",
    ),
    "hvdtrain.compat.horovod.reduction_arguments": _REDUCTIONS,
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
}

KERAS: Mapping[str, Sequence[str]] = {
    **_COMMON,
    "hvdtrain.compat.horovod.reduction_arguments": ("Adasum", "Average", "Sum"),
    "hvdtrain.compat.horovod.keras_optimizer": (
        "DistributedOptimizer",
        "PartialDistributedOptimizer",
        "load_model",
    ),
    "hvdtrain.compat.horovod.keras_ops": (
        "allgather",
        "allreduce",
        "broadcast",
        "reducescatter",
    ),
}

TORCH: Mapping[str, Sequence[str]] = {
    "hvdtrain.world": [name for name in _WORLD if name != "shutdown"],
    "hvdtrain.compat.horovod.build_info": (*_BUILD_INFO, "is_homogeneous"),
    "hvdtrain.compat.horovod.process_sets": ("ProcessSet", "global_process_set"),
    "hvdtrain.compat.horovod.elastic_state": ("HorovodInternalError",),
    "hvdtrain.compat.horovod.reduction_arguments": _REDUCTIONS,
    "hvdtrain.compat.horovod.torch.job": (
        "add_process_set",
        "cuda_built",
        "init",
        "nccl_built",
        "remove_process_set",
        "rocm_built",
        "shutdown",
    ),
    "hvdtrain.compat.horovod.torch.reductions": (
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_allreduce_async",
        "grouped_allreduce_async_",
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "reducescatter",
        "reducescatter_async",
        "sparse_allreduce_async",
    ),
    "hvdtrain.compat.horovod.torch.exchanges": (
        "allgather",
        "allgather_async",
        "alltoall",
        "alltoall_async",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_async",
        "broadcast_async_",
        "grouped_allgather",
        "grouped_allgather_async",
        "join",
    ),
    "hvdtrain.compat.horovod.torch.operations": ("poll", "synchronize"),
    "hvdtrain.compat.horovod.torch.compression": ("Compression",),
    "hvdtrain.compat.horovod.torch.broadcast": (
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ),
    "hvdtrain.compat.horovod.torch.optimizer": ("DistributedOptimizer",),
    "hvdtrain.compat.horovod.torch.sync_batch_norm": ("SyncBatchNorm",),
}
