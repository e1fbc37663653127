"""Horovod's functions that describe the job and the installation."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.compat.horovod.process_sets import find_process_set

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_ranks",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "local_rank_op",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank_op",
    "rocm_built",
    "size_op",
]


def cross_rank() -> int:
    """Return this rank's index among the ranks that have the same local rank.

    These ranks are on different hosts.
    """
    rank = world.topology().rank
    return cross_ranks(world.hosts(), rank).index(rank)


def cross_size() -> int:
    """Return the number of hosts that have a rank with this rank's local rank."""
    return len(cross_ranks(world.hosts(), world.topology().rank))


def cross_ranks(hosts: Sequence[int], rank: int) -> list[int]:
    """Return all ranks that have the same local rank as ``rank``.

    ``hosts`` contains the host of each rank.
    """
    seen: Counter[int] = Counter()
    local_ranks = []
    for host in hosts:
        local_ranks.append(seen[host])
        seen[host] += 1
    return [other for other, local in enumerate(local_ranks) if local == local_ranks[rank]]


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len(set(Counter(world.hosts()).values())) == 1


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that holds ``rank()`` when the graph runs."""
    return _int_op(world.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that holds ``local_rank()`` when the graph runs."""
    return _int_op(world.local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that holds the size of a process set when the graph runs."""
    return _int_op(lambda: len(find_process_set(process_set_id).ranks), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that holds ``local_size()`` when the graph runs."""
    return _int_op(world.local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an int32 tensor that is 1 if a process set includes this rank, otherwise 0."""
    return _int_op(lambda: int(find_process_set(process_set_id).included()), name)


def _int_op(function: Callable[[], int], name: str | None) -> tf.Tensor:
    result = tf.numpy_function(lambda: np.int32(function()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def mpi_built(verbose: bool = False) -> bool:
    """Return whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether this process uses MPI."""
    return _mpi() is not None


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI at the same time."""
    mpi = _mpi()
    return mpi is not None and bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def _mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() else None


def gloo_built(verbose: bool = False) -> bool:
    """Return False: hvdtrain does not use Gloo."""
    return False


def gloo_enabled() -> bool:
    """Return False: hvdtrain does not use Gloo."""
    return False


def cuda_built() -> bool:
    """Return whether TensorFlow was built with CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether TensorFlow was built with ROCm."""
    return bool(tf.test.is_built_with_rocm())


def nccl_built(verbose: bool = False) -> bool:
    """Return whether TensorFlow includes NCCL, as its GPU builds do."""
    return cuda_built() or rocm_built()


def ddl_built() -> bool:
    """Return False: hvdtrain does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: hvdtrain does not use Intel's oneCCL."""
    return False
