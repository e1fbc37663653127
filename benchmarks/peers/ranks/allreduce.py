"""Allreduce by size and number of arrays, with one library."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
from link_calls import arrays_of, time_ways

__all__ = ["measure"]

Arrays = list[np.ndarray]
CALL_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of a library.

    Attributes:
        rank: This rank.
        ranks: Number of ranks.
        reducer: Returns a blocking function that sums the given arrays over all ranks.
        barrier: Waits for all ranks.
        leave: Called at the end.
    """

    rank: int
    ranks: int
    reducer: Callable[[Arrays], Callable[[], object]]
    barrier: Callable[[], object]
    leave: Callable[[], object] = lambda: None


def measure(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the median seconds of each case by its name."""
    library = job["library"]
    group = GROUPS[library](job)
    results: dict[str, Any] = {"ranks": group.ranks}
    for name, (nbytes, count) in job["cases"].items():
        call = group.reducer(arrays_of(nbytes, group.rank, count))
        times: dict[str, dict[int, list[float]]] = {}
        time_ways({library: call}, nbytes, job["runs"], group.barrier, times)
        results[name] = median(times[library][nbytes])
    group.leave()
    return results if group.rank == 0 else None


def _of_hvdtrain(job: dict[str, Any]) -> Group:
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.config import read_settings

    engine: Any = create(read_topology(os.environ), read_settings(os.environ))

    def reducer(arrays: Arrays) -> Callable[[], object]:
        return lambda: engine.grouped_allreduce(arrays, name="arrays")

    return Group(
        rank=engine.rank,
        ranks=engine.size,
        reducer=reducer,
        barrier=engine.barrier,
        leave=engine.transport.leave,
    )


def _of_ring(job: dict[str, Any]) -> Group:
    import tensorflow as tf

    os.environ["HVDTRAIN_BACKEND"] = "nccl"
    import hvdtrain
    from hvdtrain import world

    hvdtrain.init()
    devices: Any = world.device_collectives()

    def reducer(arrays: Arrays) -> Callable[[], object]:
        with tf.device(devices.device):
            tensors = [tf.constant(array) for array in arrays]

        @tf.function
        def reduce() -> tf.Tensor:
            return tf.stack([total[0] for total in devices.allreduce(tensors, "sum", name="all")])

        # Reading the values waits for the reduction.
        return lambda: reduce().numpy()

    return Group(
        rank=hvdtrain.rank(),
        ranks=hvdtrain.size(),
        reducer=reducer,
        barrier=world.collectives().barrier,
    )


def _of_mpi(job: dict[str, Any]) -> Group:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def reducer(arrays: Arrays) -> Callable[[], object]:
        totals = [np.empty_like(array) for array in arrays]

        def call() -> None:
            for array, total in zip(arrays, totals):
                world.Allreduce(array, total)

        return call

    return Group(
        rank=world.Get_rank(), ranks=world.Get_size(), reducer=reducer, barrier=world.Barrier
    )


def _of_names(module: str) -> Callable[[dict[str, Any]], Group]:
    """Return the group of Horovod, or of a module with its API."""

    def make(job: dict[str, Any]) -> Group:
        import tensorflow as tf

        hvd = importlib.import_module(module)
        hvd.init()

        def reducer(arrays: Arrays) -> Callable[[], object]:
            tensors = [tf.constant(array) for array in arrays]
            return lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="arrays")

        def barrier() -> None:
            hvd.allreduce(tf.zeros([1]), name="barrier")

        return Group(rank=hvd.rank(), ranks=hvd.size(), reducer=reducer, barrier=barrier)

    return make


def _of_torch(job: dict[str, Any]) -> Group:
    import torch
    from torch import distributed

    from peers.ranks.torch_group import join

    rank, ranks = join(job)

    def reducer(arrays: Arrays) -> Callable[[], object]:
        # Sums are in place; zeros stay zeros in repeated calls.
        tensors = [torch.from_numpy(np.zeros_like(array)) for array in arrays]

        def call() -> None:
            works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait(CALL_TIMEOUT)

        return call

    return Group(
        rank=rank,
        ranks=ranks,
        reducer=reducer,
        barrier=distributed.barrier,
        leave=distributed.destroy_process_group,
    )


GROUPS: Mapping[str, Callable[[dict[str, Any]], Group]] = {
    "hvdtrain": _of_hvdtrain,
    "hvdtrain.tensorflow": _of_names("hvdtrain.tensorflow"),
    "ring": _of_ring,
    "mpi": _of_mpi,
    "horovod": _of_names("horovod.tensorflow"),
    "torch": _of_torch,
}
