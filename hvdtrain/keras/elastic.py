"""Horovod's elastic training for Keras, under Horovod's path."""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.compat.horovod.keras_elastic")
