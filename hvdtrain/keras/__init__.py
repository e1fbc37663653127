"""Keras models on several ranks, and Horovod's names for Keras.

::

    import hvdtrain.keras as hvd

Importing this module doesn't load TensorFlow. TensorFlow is loaded when the program first uses one
of the module's names, such as ``hvd.DistributedOptimizer``.
"""

from __future__ import annotations

from hvdtrain.compat.horovod.names import KERAS
from hvdtrain.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, KERAS, submodules=("callbacks", "elastic"))
