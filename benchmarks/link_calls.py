"""A rank of between_hosts.py: seconds of a call by candidate and size.

    mpirun ... python link_calls.py hvdtrain \
        '{"call": "allreduce", "bytes": [4, 67108864], "runs": 5, "hosts": 4}'

With ``hvdtrain`` it times plain TCP, MPI and hvdtrain; with ``horovod``, in an environment that
contains it, Horovod. The chief prints the times as one line of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TCP_PORT = 45454
# Limit for reads, writes and connections.
LINK_TIMEOUT_S = 60.0
# Larger data is divided into several arrays, like gradients.
ONE_ARRAY_BYTES = 1 << 20
ARRAYS = 40
# Calls per measurement of small arrays.
MAX_CALLS = 100
BYTES_PER_RUN = 2 << 20

Way = Callable[..., object]
NAMES_OF_MPI = {"allreduce": "MPI_Allreduce", "broadcast": "MPI_Bcast"}
Times = dict[str, dict[int, list[float]]]


def main() -> None:
    """Measure and print the times."""
    library, job = sys.argv[1], json.loads(sys.argv[2])
    measure = {"hvdtrain": measure_hvdtrain, "horovod": measure_horovod}[library]
    if times := measure(job):
        print(json.dumps(times), flush=True)


def measure_hvdtrain(job: dict[str, Any]) -> Times:
    """Measure TCP, MPI and hvdtrain; the result is empty except on the chief."""
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.collectives.mpi_start import start_mpi
    from hvdtrain.config import read_settings

    call, runs, hosts = job["call"], job["runs"], job["hosts"]
    topology = read_topology(os.environ)
    world = start_mpi(topology).COMM_WORLD
    engine: Any = create(topology, read_settings(os.environ))
    link = Link(world, topology.local_rank, topology.local_size, hosts)
    times: Times = {}
    for size in job["bytes"]:
        of_mpi, of_hvdtrain, total = ways_of(call, size, world, engine)
        ways: dict[str, Way] = {NAMES_OF_MPI[call]: of_mpi, "hvdtrain": of_hvdtrain}
        for form in job["compression"]:
            ways[f"hvdtrain, {form}"] = functools.partial(of_hvdtrain, wire=form)
        if size > ONE_ARRAY_BYTES:
            # The bytes that must leave a host.
            moved = size if call == "broadcast" else 2 * (hosts - 1) * size // hosts
            ways = {"TCP": functools.partial(link.move, moved), **ways}
            count_bytes(ways, size, world, topology.local_rank)
        time_ways(ways, size, runs, world.Barrier, times)
        results: Any = of_hvdtrain()
        if not np.allclose(np.concatenate(results), total, rtol=1e-4):
            raise SystemExit("the results of hvdtrain differ from MPI's")
    engine.transport.leave()
    return times if engine.rank == 0 else {}


def ways_of(call: str, size: int, world: Any, engine: Any) -> tuple[Way, Way, np.ndarray]:
    """Return MPI's call on one array, hvdtrain's on several, and the array of MPI's result."""
    arrays = arrays_of(size, engine.rank)
    flat = np.concatenate(arrays)
    total = flat.copy()

    def broadcast() -> list[np.ndarray]:
        return [engine.broadcast(array, name="array") for array in arrays]

    if call == "broadcast":
        return functools.partial(world.Bcast, total), broadcast, total
    of_mpi = functools.partial(world.Allreduce, flat, total)
    return of_mpi, functools.partial(engine.grouped_allreduce, arrays, name="arrays"), total


def measure_horovod(job: dict[str, Any]) -> Times:
    """Measure Horovod's allreduce; the result is empty except on rank 0."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    barrier = functools.partial(hvd.allreduce, tf.zeros([1]), name="barrier")
    times: Times = {}
    for size in job["bytes"]:
        tensors = [tf.constant(array) for array in arrays_of(size, hvd.rank())]
        allreduce = functools.partial(hvd.grouped_allreduce, tensors, op=hvd.Sum, name="arrays")
        time_ways({"Horovod": allreduce}, size, job["runs"], barrier, times)
    return times if hvd.rank() == 0 else {}


def count_bytes(ways: dict[str, Way], size: int, world: Any, local_rank: int) -> None:
    """Print the most bytes that a host sends in a call of each candidate, on the chief."""
    for name, way in ways.items():
        world.Barrier()
        before = bytes_sent()
        way()
        world.Barrier()
        most = max(world.allgather(bytes_sent() - before if local_rank == 0 else 0))
        if world.Get_rank() == 0:
            print(f"{name}, {size} bytes: {most} bytes left a host", flush=True)


def bytes_sent() -> int:
    """Return the bytes that this host has sent over its link, including headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise SystemExit("the interface eth0 does not exist")


def arrays_of(size: int, rank: int, count: int = 0) -> list[np.ndarray]:
    """Return float32 arrays of ``size`` bytes in total; with 0, the count depends on the size."""
    count = count or (1 if size <= ONE_ARRAY_BYTES else ARRAYS)
    generator = np.random.default_rng(rank)
    return [generator.random(max(1, size // 4 // count), np.float32) for _ in range(count)]


def time_ways(
    ways: dict[str, Way], size: int, runs: int, barrier: Callable[[], object], times: Times
) -> None:
    """Add the seconds of a call of each candidate to ``times``, after a warm-up run."""
    calls = max(1, min(MAX_CALLS, BYTES_PER_RUN // size))
    for run in range(runs + 1):
        for name, way in ways.items():
            barrier()
            start_s = time.perf_counter()
            for _ in range(calls):
                way()
            if calls == 1:
                barrier()
            call_s = (time.perf_counter() - start_s) / calls
            if run:
                times.setdefault(name, {}).setdefault(size, []).append(call_s)


class Link:
    """Connections to the next and from the previous host, for one rank of each host."""

    def __init__(self, world: Any, local_rank: int, local_size: int, hosts: int) -> None:
        self._idle = local_rank > 0
        names = world.allgather(socket.gethostname())
        if not self._idle:
            listener = socket.create_server(("", TCP_PORT))
            listener.settimeout(LINK_TIMEOUT_S)
        world.Barrier()
        if not self._idle:
            following = names[(world.Get_rank() + local_size) % (hosts * local_size)]
            self._out = socket.create_connection((following, TCP_PORT), LINK_TIMEOUT_S)
            self._out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._in, _ = listener.accept()
            self._in.settimeout(LINK_TIMEOUT_S)
            listener.close()

    def move(self, nbytes: int) -> None:
        """Send and receive ``nbytes``."""
        if self._idle:
            return
        sender = threading.Thread(target=self._out.sendall, args=[bytes(nbytes)])
        sender.start()
        buffer = bytearray(1 << 20)
        left = nbytes
        while left:
            received = self._in.recv_into(buffer, min(left, len(buffer)))
            if not received:
                raise ConnectionError(f"the previous host closed its link {left} bytes too early")
            left -= received
        sender.join(LINK_TIMEOUT_S)


if __name__ == "__main__":
    main()
