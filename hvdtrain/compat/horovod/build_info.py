"""Horovod's functions that describe the job and the installation.

These functions are the same for TensorFlow and PyTorch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvdtrain import world

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_ranks",
    "cross_size",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
]


def cross_rank() -> int:
    """Return the index of this rank among the ranks that have the same local rank.

    Each of these ranks is on a different host.
    """
    rank = world.topology().rank
    return cross_ranks(world.hosts(), rank).index(rank)


def cross_size() -> int:
    """Return the number of hosts on which some rank has the same local rank as this rank."""
    return len(cross_ranks(world.hosts(), world.topology().rank))


def cross_ranks(hosts: Sequence[int], rank: int) -> list[int]:
    """Return the ranks with the same local rank as ``rank``.

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


def ddl_built() -> bool:
    """Return False: hvdtrain does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: hvdtrain does not use Intel's oneCCL."""
    return False
