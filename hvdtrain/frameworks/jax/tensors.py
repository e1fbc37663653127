"""NumPy functions that run on arrays of JAX, even within compiled functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from hvdtrain.errors import HvdtrainError
from hvdtrain.frameworks.interface import Arrays, Shape
from hvdtrain.frameworks.jax.step_errors import errors, is_traced

__all__ = [
    "ERRORS",
    "SPARSE_ROWS",
    "array_of",
    "numpy_type",
    "run_on_host",
    "runs_later",
    "scalar",
    "scaled",
    "static_shape",
    "to_tensor",
    "uncompiled",
]

ERRORS: tuple[type[Exception], ...] = (jax.errors.JaxRuntimeError,)
SPARSE_ROWS = None


def run_on_host(
    function: Callable[..., Arrays],
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    types: Sequence[Any] | None = None,
) -> list[jax.Array]:
    """Run a NumPy function on arrays. While JAX traces a function, add an ordered callback to it.

    ``hvdtrain.frameworks.interface.Framework.run_on_host`` describes the arguments. For
    differentiation, the arguments and results are constants.
    """
    inputs = [jax.lax.stop_gradient(to_tensor(tensor)) for tensor in tensors]
    types = types or [tensor.dtype for tensor in inputs[: len(shapes)]]

    def host(*arrays: Any) -> list[np.ndarray]:
        # No function of JAX may be called here, because a callback could wait for itself then.
        try:
            results = function(*map(np.asarray, arrays))
        except HvdtrainError:
            # The program receives the error, so JAX should not log it as well.
            logging.getLogger("jax._src.callback").addFilter(_is_unexpected)
            raise
        return [np.asarray(result, dtype) for result, dtype in zip(results, types)]

    if is_traced(inputs):
        like = [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in zip(shapes, types)]
        return list(io_callback(errors.guarded(host, like), like, *inputs, ordered=True))
    return [jnp.array(result) for result in host(*inputs)]


def _is_unexpected(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HvdtrainError)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged, because it may be traced."""
    return function


def runs_later() -> bool:
    """Return False: a compiled function runs callbacks only after it has computed all gradients."""
    return False


def array_of(tensor: Any) -> np.ndarray:
    """Return the values of an array that is not traced as a NumPy array."""
    return np.asarray(tensor)


def to_tensor(value: Any) -> jax.Array:
    """Return a number, an array or a variable of Keras as an array of JAX."""
    return jnp.asarray(getattr(value, "value", value))


def scalar(value: Any, like: jax.Array) -> jax.Array:
    """Return a number or a scalar array as an array with the type of ``like``."""
    return jnp.asarray(value, like.dtype)


def scaled(gradient: jax.Array, factor: Any) -> jax.Array:
    """Multiply a gradient by a number or a scalar array. 0 gives zeros, even for NaN."""
    factor = scalar(factor, gradient)
    return jnp.where(factor == 0, jnp.zeros_like(gradient), gradient * factor)


def numpy_type(tensor: jax.Array) -> np.dtype:
    """Return the NumPy type of an array's values."""
    return tensor.dtype


def static_shape(tensor: jax.Array) -> Shape | None:
    """Return the shape of an array, whose sizes are always known."""
    return tuple(tensor.shape)
