"""Keras models on several ranks, and Horovod's names for Keras.

::

    import hvdtrain.keras as hvd

Importing this module doesn't load TensorFlow. TensorFlow is loaded when the program first uses one
of the module's names, such as ``hvd.DistributedOptimizer``.
"""

from __future__ import annotations

from hvdtrain.lazy import lazy_names
from hvdtrain.tensorflow import COMMON_NAMES

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **COMMON_NAMES,
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
    },
    submodules=("callbacks", "elastic"),
)
