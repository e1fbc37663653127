"""Horovod's elastic training for Keras, importable as ``hvdtrain.keras.elastic``."""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.compat.horovod.keras_elastic")
