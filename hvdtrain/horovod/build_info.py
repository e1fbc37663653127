"""Queries about the job and about what this installation can do, under Horovod's names."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.horovod.process_sets import find_process_set

__all__ = [
    "ccl_built",
    "cross_rank",
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
    "ranks_across",
    "rocm_built",
    "size_op",
]


def cross_rank() -> int:
    """Return how many hosts before this one have a rank with this rank's local rank."""
    mine = world.topology().rank
    return ranks_across(world.hosts(), mine).index(mine)


def cross_size() -> int:
    """Return how many hosts have a rank with this rank's local rank."""
    return len(ranks_across(world.hosts(), world.topology().rank))


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return len(set(Counter(world.hosts()).values())) == 1


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return a tensor with ``rank()`` when the graph runs, int32."""
    return _asked(world.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return a tensor with ``local_rank()`` when the graph runs, int32."""
    return _asked(world.local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return a tensor with the number of ranks of a process set when the graph runs, int32."""
    return _asked(lambda: len(find_process_set(process_set_id).ranks), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return a tensor with ``local_size()`` when the graph runs, int32."""
    return _asked(world.local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank belongs to a process set when the graph runs, 0 if not; int32."""
    return _asked(lambda: int(find_process_set(process_set_id).included()), name)


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI can be used: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether this process uses MPI."""
    return _mpi() is not None


def mpi_threads_supported() -> bool:
    """Whether MPI takes calls of several threads at a time."""
    mpi = _mpi()
    return mpi is not None and bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def gloo_built(verbose: bool = False) -> bool:
    """False: MPI does what Horovod has Gloo for."""
    return False


def gloo_enabled() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether TensorFlow was built for Nvidia's GPUs."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether TensorFlow was built for AMD's GPUs."""
    return bool(tf.test.is_built_with_rocm())


def nccl_built(verbose: bool = False) -> bool:
    """Whether TensorFlow brings NCCL, as its builds for GPUs do."""
    return cuda_built() or rocm_built()


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def ranks_across(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks of all hosts with the same local rank as ``rank``, given the host of each rank."""
    seen: Counter[int] = Counter()
    places = []
    for host in hosts:
        places.append(seen[host])
        seen[host] += 1
    return [other for other, place in enumerate(places) if place == places[rank]]


def _asked(function: Callable[[], int], name: str | None) -> tf.Tensor:
    result = tf.numpy_function(lambda: np.int32(function()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def _mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() else None
