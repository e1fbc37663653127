"""Collectives inside TensorFlow's graphs, and Horovod's names for them.

::

    import hvdtrain.tensorflow as hvd

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "hvdtrain.tensorflow.start": ("init",),
    "hvdtrain.world": (
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
    ),
    "hvdtrain.tensorflow.queries": (
        "ccl_built",
        "cross_rank",
        "cross_size",
        "cuda_built",
        "ddl_built",
        "gloo_built",
        "gloo_enabled",
        "is_homogeneous",
        "local_rank_op",
        "local_size_op",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "process_set_included_op",
        "rank_op",
        "rocm_built",
        "size_op",
    ),
    "hvdtrain.tensorflow.process_sets": (
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    ),
    "hvdtrain.tensorflow.reductions": ("Average", "Max", "Min", "Product", "Sum"),
    "hvdtrain.tensorflow.compression": ("Compression",),
    "hvdtrain.tensorflow.operations": (
        "allgather",
        "allreduce",
        "alltoall",
        "broadcast",
        "broadcast_",
        "grouped_allgather",
        "grouped_allreduce",
        "grouped_reducescatter",
        "reducescatter",
    ),
    "hvdtrain.tensorflow.tapes": (
        "DistributedGradientTape",
        "PartialDistributedGradientTape",
    ),
    "hvdtrain.tensorflow.exchange": (
        "allgather_object",
        "broadcast_object",
        "broadcast_variables",
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hvdtrain.tensorflow' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
