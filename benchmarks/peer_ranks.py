"""One rank of a job of ``against_peers.py``, for all libraries.

    python peer_ranks.py '{"library": "torch", "cases": ..., "result": "/tmp/x.json", ...}'

Rank 0 writes the results as JSON: times of allreduces if the job has ``cases``, otherwise figures
of trainings. Each library is imported in its own environment.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from peer_training import measure_training

# Calls per measurement of small arrays.
MAX_CALLS = 100
BYTES_PER_RUN = 2 << 20
CALL_TIMEOUT = timedelta(seconds=120)
# Modules with Horovod's names.
MODULES = {
    "hvdtrain": "hvdtrain",
    "ring": "hvdtrain",
    "hvdtrain.tensorflow": "hvdtrain.tensorflow",
    "hvdtrain.torch": "hvdtrain.torch",
    "horovod": "horovod.tensorflow",
}

Arrays = list[np.ndarray]


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ.update(job["environ"])
    # Other environments don't contain hvdtrain.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    rank, results = measure_calls(job) if "cases" in job else measure_training(job, join)
    if rank == 0:
        draft = Path(job["result"]).with_suffix(".part")
        draft.write_text(json.dumps(results))
        draft.rename(job["result"])


def join(job: dict[str, Any]) -> tuple[int, int, Any]:
    """Start a library, and return rank, number of ranks, and the module with Horovod's names."""
    library = job["library"]
    if library == "torch":
        return *join_gloo(job), None
    if library not in MODULES:
        return 0, 1, None
    if library == "ring":
        os.environ["HVDTRAIN_BACKEND"] = "nccl"
    hvd = importlib.import_module(MODULES[library])
    hvd.init()
    return hvd.rank(), hvd.size(), hvd


def join_gloo(job: dict[str, Any]) -> tuple[int, int]:
    """Join torch's process group if torchrun or mpirun has started this rank."""
    from torch import distributed

    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    elif "OMPI_COMM_WORLD_SIZE" in os.environ:
        # Ranks find each other through a shared file.
        distributed.init_process_group(
            "gloo",
            init_method=Path(job["result"]).with_suffix(".meeting").as_uri(),
            rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )
    else:
        return 0, 1
    atexit.register(distributed.destroy_process_group)
    return distributed.get_rank(), distributed.get_world_size()


class Group(NamedTuple):
    """The ranks of a library."""

    rank: int  # this rank
    size: int  # number of ranks
    tensors_of: Callable[[Arrays], Any]  # converts arrays to the library's tensors
    call: Callable[[Any], object]  # sums tensors over all ranks, and waits for the result
    barrier: Callable[[], object]  # waits for all ranks
    leave: Callable[[], object] = lambda: None  # called at the end


def measure_calls(job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the rank, and the median seconds of each case by its name."""
    groups = {"hvdtrain": engine_group, "mpi": mpi_group, "ring": ring_group, "torch": torch_group}
    group = groups.get(job["library"], hvd_group)(job)
    results: dict[str, Any] = {"ranks": group.size}
    generator = np.random.default_rng(group.rank)
    for name, (nbytes, count) in job["cases"].items():
        values = max(1, nbytes // 4 // count)
        tensors = group.tensors_of([generator.random(values, np.float32) for _ in range(count)])
        calls = max(1, min(MAX_CALLS, BYTES_PER_RUN // nbytes))
        times = [time_calls(group, tensors, calls) for _ in range(job["runs"] + 1)]
        results[name] = median(times[1:])
    group.leave()
    return group.rank, results


def time_calls(group: Group, tensors: Any, calls: int) -> float:
    """Return the seconds of a call."""
    group.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        group.call(tensors)
    if calls == 1:
        group.barrier()
    return (time.perf_counter() - start_s) / calls


def engine_group(job: dict[str, Any]) -> Group:
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.config import read_settings

    engine: Any = create(read_topology(os.environ), read_settings(os.environ))

    def call(arrays: Arrays) -> object:
        if job.get("call") == "broadcast":
            return [engine.broadcast(array, name="array") for array in arrays]
        return engine.grouped_allreduce(arrays, name="arrays", wire=job.get("wire", "none"))

    leave = engine.transport.leave
    return Group(engine.rank, engine.size, lambda arrays: arrays, call, engine.barrier, leave)


def mpi_group(job: dict[str, Any]) -> Group:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def tensors_of(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(array, np.empty_like(array)) for array in arrays]

    def call(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for array, total in pairs:
            if job.get("call") == "broadcast":
                world.Bcast(array)
            else:
                world.Allreduce(array, total)

    return Group(world.Get_rank(), world.Get_size(), tensors_of, call, world.Barrier)


def ring_group(job: dict[str, Any]) -> Group:
    import tensorflow as tf

    from hvdtrain import world

    rank, size, _ = join(job)
    devices: Any = world.device_collectives()

    def tensors_of(arrays: Arrays) -> Any:
        with tf.device(devices.device):
            return [tf.constant(array) for array in arrays]

    @tf.function
    def reduce(tensors: Any) -> tf.Tensor:
        return tf.stack([total[0] for total in devices.allreduce(tensors, "sum", name="all")])

    def call(tensors: Any) -> object:
        # Reading the values waits for the reduction.
        return reduce(tensors).numpy()

    return Group(rank, size, tensors_of, call, world.collectives().barrier)


def hvd_group(job: dict[str, Any]) -> Group:
    """Return the group of a module with Horovod's names."""
    import tensorflow as tf

    rank, size, hvd = join(job)

    def tensors_of(arrays: Arrays) -> Any:
        return [tf.constant(array) for array in arrays]

    def call(tensors: Any) -> object:
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, name="arrays")

    return Group(rank, size, tensors_of, call, lambda: hvd.allreduce(tf.zeros([1]), name="barrier"))


def torch_group(job: dict[str, Any]) -> Group:
    import torch
    from torch import distributed

    rank, size, _ = join(job)

    def tensors_of(arrays: Arrays) -> Any:
        # Sums are in place; zeros stay zeros in repeated calls.
        return [torch.zeros(array.shape) for array in arrays]

    def call(tensors: Any) -> None:
        works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait(CALL_TIMEOUT)

    return Group(rank, size, tensors_of, call, distributed.barrier)


if __name__ == "__main__":
    main()
