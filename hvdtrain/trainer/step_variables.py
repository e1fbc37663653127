"""Small variables that training steps change, and that checkpoints save.

On TensorFlow they are Keras variables, which a graph can change. On torch and JAX they are arrays
in host memory, because everything they depend on is known before a step.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

__all__ = ["HostVariable", "step_variable"]


class HostVariable:
    """An array with the methods of a variable."""

    def __init__(self, value: Any, *, dtype: str, name: str) -> None:
        self.value = np.array(value, dtype)  # the array, which is never changed in place
        self.name = self.path = name
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    def numpy(self) -> np.ndarray:
        """Return the array."""
        return self.value

    def assign(self, value: Any) -> None:
        """Set the array to a copy of another array of the same shape."""
        self.value = np.array(value, self.dtype).reshape(self.shape)


def step_variable(value: Any, *, dtype: str, name: str) -> Any:
    """Create a variable. It may be created while TensorFlow traces a step."""
    if keras.backend.backend() != "tensorflow":
        return HostVariable(value, dtype=dtype, name=name)
    import tensorflow as tf

    with tf.init_scope():
        return keras.Variable(value, dtype=dtype, trainable=False, name=name)
