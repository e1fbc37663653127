"""States of PyTorch's default random generators."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

__all__ = ["random_state", "restore_random_state"]

_CPU, _GPU = "torch", "torch gpu"
_GPU_BYTES = 16


def random_state() -> dict[str, np.ndarray]:
    """Return the states of the generators of the CPU and of this rank's GPU.

    The shapes and dtypes are the same on every rank. Without a GPU, its state is zero.
    """
    gpu = np.zeros(_GPU_BYTES, np.uint8)
    if torch.cuda.is_available():
        gpu = torch.cuda.get_rng_state().numpy()
    return {_CPU: torch.get_rng_state().numpy(), _GPU: gpu}


def restore_random_state(state: Mapping[str, np.ndarray]) -> None:
    """Restore the result of ``random_state``. States of zeros and missing states are skipped."""
    if _CPU in state and state[_CPU].any():
        torch.set_rng_state(torch.from_numpy(state[_CPU].copy()))
    if _GPU in state and state[_GPU].any() and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state[_GPU].copy()))
