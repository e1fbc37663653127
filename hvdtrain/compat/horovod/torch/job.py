"""Functions that start and end the job of a PyTorch program, or describe PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain import world
from hvdtrain.compat.horovod import process_sets as sets
from hvdtrain.compat.horovod.torch.call_queue import calls

__all__ = [
    "add_process_set",
    "cuda_built",
    "init",
    "nccl_built",
    "remove_process_set",
    "rocm_built",
    "shutdown",
]


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Start the job like ``hvdtrain.init("torch")``, and add process sets.

    The arguments are described in ``hvdtrain.tensorflow.init``.
    """
    sets.init_with("torch", comm, process_sets)


def shutdown() -> None:
    """Wait for pending operations, and leave the job.

    If one rank calls this, all ranks must call it.
    """
    calls.wait()
    world.shutdown()


def add_process_set(process_set: sets.ProcessSet | Sequence[int]) -> sets.ProcessSet:
    """Wait for pending operations, and make a process set usable.

    See ``hvdtrain.tensorflow.add_process_set``.
    """
    return calls.run(lambda: sets.add_process_set(process_set))


def remove_process_set(process_set: sets.ProcessSet) -> bool:
    """Wait for pending operations, close a process set, and return whether it was usable.

    All ranks must call this.
    """
    return calls.run(lambda: sets.remove_process_set(process_set))


def cuda_built() -> bool:
    """Return whether PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built with ROCm."""
    return torch.version.hip is not None


def nccl_built(verbose: bool = False) -> bool:
    """Return False: tensors are combined in host memory."""
    return False
