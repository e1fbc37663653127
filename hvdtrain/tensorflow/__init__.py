"""Collectives inside TensorFlow's graphs, and Horovod's API for TensorFlow.

::

    import hvdtrain.tensorflow as hvd

A module is loaded when the program first uses one of its names.
"""

from __future__ import annotations

from hvdtrain.compat.horovod.names import TENSORFLOW
from hvdtrain.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, TENSORFLOW, submodules=("elastic", "keras"))
