"""Functions for PyTorch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

__all__ = ["array_of", "tensor_of"]


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor as a NumPy array.

    If the tensor is contiguous and on the CPU, the array is a view of it. Otherwise it is a copy.
    """
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:  # not supported by NumPy
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def tensor_of(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return an array as a tensor on the same device as ``like``. On the CPU, nothing is copied."""
    values: Any = array
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).to(like.device)
    return torch.from_numpy(values).to(like.device)
