"""Values of variables as NumPy arrays, for all backends of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdtrain.frameworks import of_keras

__all__ = ["array_of", "assign", "attach_state", "dtype_of"]


def array_of(variable: Any) -> np.ndarray:
    """Return the value of a variable, without a copy if possible.

    Copy the result to keep it, because some backends change values in place.

    The variable may also be a ``tf.Variable``, or an object with a NumPy array ``value``.
    """
    value = _value(variable)
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "read_value"):
        value = value.read_value()
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError):
        # Tensors of torch, and types such as bfloat16, don't support the buffer protocol.
        return of_keras().array_of(value)


def assign(variable: Any, array: np.ndarray) -> None:
    """Set a variable to a copy of an array, cast to the variable's dtype."""
    # JAX uses the memory of some arrays without a copy.
    variable.assign(np.array(array, dtype_of(variable)))


def attach_state(model: keras.Model) -> None:
    """Set the variables of a model and its optimizer to their current values.

    Within an epoch, JAX's steps pass these values on without the variables. Call this before you
    read or assign variables between two steps.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def dtype_of(variable: Any) -> np.dtype:
    """Return the dtype of a variable's value.

    JAX stores 64-bit types in 32 bits, although ``variable.dtype`` names the original type.
    """
    return np.dtype(keras.backend.standardize_dtype(_value(variable).dtype))


def _value(variable: Any) -> Any:
    value = variable.value
    return variable if callable(value) else value  # a method of tf.Variable
