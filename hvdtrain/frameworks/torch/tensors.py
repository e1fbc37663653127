"""NumPy functions that run on tensors of PyTorch, and conversions of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hvdtrain.frameworks.interface import Arrays, Shape

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
    "tensor_of",
    "to_tensor",
    "uncompiled",
]

ERRORS: tuple[type[Exception], ...] = ()
"""PyTorch raises the original error, even if ``torch.compile`` has compiled the caller."""
SPARSE_ROWS = None
uncompiled = torch.compiler.disable


@uncompiled
def run_on_host(
    function: Callable[..., Arrays],
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    types: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    """Run a NumPy function on tensors immediately. ``torch.compile`` does not compile the function.

    ``hvdtrain.frameworks.interface.Framework.run_on_host`` describes the arguments. The results
    are on the device of the first tensor.
    """
    inputs = [to_tensor(tensor) for tensor in tensors]
    results: Sequence[Any] = function(*map(array_of, inputs))
    if types is None:
        types = [numpy_type(tensor) for tensor in inputs[: len(shapes)]]
    return [
        tensor_of(np.asarray(result, dtype), like=inputs[0] if inputs else None)
        for result, dtype in zip(results, types)
    ]


def runs_later() -> bool:
    """Return False: a step computes all gradients before the optimizer receives them."""
    return False


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor as a NumPy array.

    If the tensor is contiguous and on the CPU, the array is a view of it. Otherwise it is a copy.
    """
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:  # not supported by NumPy
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def tensor_of(array: np.ndarray, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return an array as a tensor on the same device as ``like``. On the CPU, nothing is copied.

    An array that can't be written to is copied, because a tensor always can.
    """
    values: Any = np.require(array, requirements="W")
    device = None if like is None else like.device
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(values).to(device)


def to_tensor(value: Any) -> torch.Tensor:
    """Return a number, an array or a variable of Keras as a tensor."""
    value = getattr(value, "value", value)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return tensor_of(np.asarray(value))
    return torch.as_tensor(value)


def scalar(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a number or a scalar tensor as a tensor with the type and device of ``like``."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def scaled(gradient: torch.Tensor, factor: Any) -> torch.Tensor:
    """Multiply a gradient by a number or a scalar tensor. 0 gives zeros, even for NaN.

    If the factor is the number 1, the result is the gradient itself.
    """
    if isinstance(factor, int | float):
        if factor == 1:  # all batches have the same size
            return gradient
        return gradient * factor if factor else torch.zeros_like(gradient)
    factor = scalar(factor, gradient)
    return torch.where(factor == 0, torch.zeros_like(gradient), gradient * factor)


def numpy_type(tensor: torch.Tensor) -> np.dtype:
    """Return the NumPy type of a tensor's values."""
    return _numpy_type(tensor.dtype)


@functools.cache
def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return array_of(torch.empty(0, dtype=dtype)).dtype


def static_shape(tensor: torch.Tensor) -> Shape | None:
    """Return the shape of a tensor, whose sizes are always known."""
    return tuple(tensor.shape)
