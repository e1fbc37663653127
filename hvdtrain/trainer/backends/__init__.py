"""The steps of a model, with one module for each backend of Keras."""

from __future__ import annotations

import importlib

import keras

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.trainer.backends.interface import Backend

__all__ = ["check_framework", "of_keras"]

_BACKENDS = ("tensorflow", "torch", "jax")


def check_framework() -> str:
    """Return the name of Keras' backend.

    Raises:
        ModelError: If hvdtrain does not support this backend, or ``init()`` prepared another one.
    """
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise ModelError(
            f"hvdtrain can't train with the Keras backend {name!r}; set KERAS_BACKEND to one of "
            f"{', '.join(_BACKENDS)}."
        )
    if name != world.framework():
        raise ModelError(
            f"hvdtrain.init() prepared devices for {world.framework()}, but the Keras backend is "
            f"{name}; import keras before hvdtrain.init(), or call hvdtrain.init({name!r})."
        )
    return name


def of_keras() -> Backend:
    """Return the module for the backend that Keras uses. The backend is checked."""
    name = check_framework()
    backend: Backend = importlib.import_module(f"hvdtrain.trainer.backends.{name}")
    return backend
