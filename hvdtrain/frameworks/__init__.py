"""The functions that hvdtrain needs from the framework of the program."""

from __future__ import annotations

import importlib
from typing import cast

from hvdtrain.frameworks.interface import Framework

__all__ = ["Framework", "of", "of_keras"]


def of(name: str) -> Framework:
    """Return the functions for ``"tensorflow"``, ``"torch"`` or ``"jax"``."""
    return cast(Framework, importlib.import_module(f"hvdtrain.frameworks.{name}.tensors"))


def of_keras() -> Framework:
    """Return the functions for the framework on which Keras runs."""
    import keras

    return of(keras.backend.backend())
