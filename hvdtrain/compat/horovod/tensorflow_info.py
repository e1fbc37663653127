"""Horovod's functions that describe TensorFlow, or that return ranks and sizes as tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.compat.horovod.process_sets import find_process_set

__all__ = [
    "cuda_built",
    "local_rank_op",
    "local_size_op",
    "nccl_built",
    "process_set_included_op",
    "rank_op",
    "rocm_built",
    "size_op",
]


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor with the value of ``rank()`` at the time when the graph runs."""
    return _int_op(world.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor with the value of ``local_rank()`` at the time when the graph runs."""
    return _int_op(world.local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor with the size of a process set at the time when the graph runs."""
    return _int_op(lambda: len(find_process_set(process_set_id).ranks), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor with the value of ``local_size()`` at the time when the graph runs."""
    return _int_op(world.local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that is 1 if a process set includes this rank, and 0 otherwise."""
    return _int_op(lambda: int(find_process_set(process_set_id).included()), name)


def _int_op(function: Callable[[], int], name: str | None) -> tf.Tensor:
    result = tf.numpy_function(lambda: np.int32(function()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def cuda_built() -> bool:
    """Return whether TensorFlow was built with CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether TensorFlow was built with ROCm."""
    return bool(tf.test.is_built_with_rocm())


def nccl_built(verbose: bool = False) -> bool:
    """Return whether TensorFlow includes NCCL, as its GPU builds do."""
    return cuda_built() or rocm_built()
