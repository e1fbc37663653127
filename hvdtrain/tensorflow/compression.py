"""The names of ``horovod.tensorflow.compression``."""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.compat.horovod.compression")
