"""Which of Keras' steps a model brings itself."""

from __future__ import annotations

import keras

__all__ = ["has_own", "has_own_call"]


def has_own(model: keras.Model, step: str) -> bool:
    """Whether the model's class defines this step itself: ``train_step`` or another."""
    return getattr(type(model), step) is not getattr(keras.Model, step)


def has_own_call(model: keras.Model) -> bool:
    """Whether the model computes something itself, rather than only holding others that do."""
    return type(model).call is not keras.Model.call
