"""Horovod's API for PyTorch.

::

    import hvdtrain.torch as hvd

A module is loaded when the program first uses one of its names. TensorFlow is never loaded.
"""

from __future__ import annotations

from hvdtrain.compat.horovod.names import TORCH
from hvdtrain.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, TORCH, submodules=("elastic",))
