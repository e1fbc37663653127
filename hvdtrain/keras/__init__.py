"""Keras models on several ranks, and Horovod's names for Keras.

::

    import hvdtrain.keras as hvd

Names are loaded when they are first used, TensorFlow with them.
"""

from __future__ import annotations

from hvdtrain.lazy import lazy_names
from hvdtrain.tensorflow import COMMON_NAMES

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **COMMON_NAMES,
        "hvdtrain.horovod.reduction_arguments": ("Adasum", "Average", "Sum"),
        "hvdtrain.horovod.keras_optimizer": (
            "DistributedOptimizer",
            "PartialDistributedOptimizer",
            "load_model",
        ),
        "hvdtrain.horovod.keras_ops": ("allgather", "allreduce", "broadcast", "reducescatter"),
    },
    submodules=("callbacks", "elastic"),
)
