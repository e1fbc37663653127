"""Horovod's API for PyTorch.

::

    import hvdtrain.torch as hvd

A module is loaded when the program first uses one of its names. TensorFlow is never loaded.
"""

from __future__ import annotations

from hvdtrain.lazy import lazy_names
from hvdtrain.tensorflow import BUILD_INFO, WORLD_NAMES

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "hvdtrain.world": [name for name in WORLD_NAMES if name != "shutdown"],
        "hvdtrain.compat.horovod.build_info": (*BUILD_INFO, "is_homogeneous"),
        "hvdtrain.compat.horovod.process_sets": ("ProcessSet", "global_process_set"),
        "hvdtrain.compat.horovod.elastic_state": ("HorovodInternalError",),
        "hvdtrain.compat.horovod.reduction_arguments": (
            "Adasum",
            "Average",
            "Max",
            "Min",
            "Product",
            "Sum",
        ),
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
    },
    submodules=("elastic",),
)
