"""The names of ``horovod.tensorflow.keras.elastic``."""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.compat.horovod.keras_elastic")
