"""One rank's part of between_hosts.py: the seconds of a call of each way, by the size of arrays.

    mpirun ... python link_calls.py hvdtrain \
        '{"call": "allreduce", "bytes": [4, 67108864], "runs": 5, "hosts": 4}'

Under ``hvdtrain`` it times plain TCP, MPI's own call and hvdtrain's in turn; under ``horovod``, in
an environment that has that, Horovod. The chief prints what it found as one line of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TCP_PORT = 45454
# For one read or write of a socket, and for the other host to connect.
LINK_TIMEOUT_S = 60.0
ROUND_TRIPS = 50
# Above, as gradients come: in several arrays.
ONE_ARRAY_BYTES = 1 << 20
ARRAYS = 40
# So many calls make one measurement of something small.
MOST_CALLS = 100
BYTES_PER_RUN = 2 << 20

Way = Callable[..., object]
NAMES_OF_MPI = {"allreduce": "MPI_Allreduce", "broadcast": "MPI_Bcast"}
Found = dict[str, dict[int, list[float]]]


def main() -> None:
    """Measure, and print."""
    library, job = sys.argv[1], json.loads(sys.argv[2])
    measure = {"hvdtrain": measure_hvdtrain, "horovod": measure_horovod}[library]
    found = measure(job)
    if found:
        print(json.dumps(found), flush=True)


def measure_hvdtrain(job: dict[str, Any]) -> Found:
    """Take part in what runs in hvdtrain's environment; empty but on the chief."""
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.collectives.mpi_start import start_mpi
    from hvdtrain.config import read_settings

    call, runs, hosts = job["call"], job["runs"], job["hosts"]
    topology = read_topology(os.environ)
    world = start_mpi(topology).COMM_WORLD
    engine: Any = create(topology, read_settings(os.environ))
    link = Link(world, topology.local_rank, topology.local_size, hosts)
    found: Found = {}
    round_trip_s = link.round_trip_s()
    if engine.rank == 0:
        print(f"a byte to the next host and one back: {round_trip_s * 1e3:.3f} ms", flush=True)
    for size in job["bytes"]:
        of_mpi, of_hvdtrain, total = ways_of(call, size, world, engine)
        ways: dict[str, Way] = {NAMES_OF_MPI[call]: of_mpi, "hvdtrain": of_hvdtrain}
        for form in job["compression"]:
            ways[f"hvdtrain, {form}"] = functools.partial(of_hvdtrain, wire=form)
        if size > ONE_ARRAY_BYTES:
            # What leaves a host at least.
            moved = size if call == "broadcast" else 2 * (hosts - 1) * size // hosts
            ways = {"TCP": functools.partial(link.move, moved), **ways}
            count_bytes(ways, size, world, topology.local_rank)
        time_ways(ways, size, runs, world.Barrier, found)
        results: Any = of_hvdtrain()
        if not np.allclose(np.concatenate(results), total, rtol=1e-4):
            raise SystemExit("hvdtrain's results are not MPI's")
    engine.transport.leave()
    return found if engine.rank == 0 else {}


def ways_of(call: str, size: int, world: Any, engine: Any) -> tuple[Way, Way, np.ndarray]:
    """Return a call of MPI, on one array, and of hvdtrain, on several, and the result of MPI's."""
    arrays = arrays_of(size, engine.rank)
    flat = np.concatenate(arrays)
    total = np.empty_like(flat)

    def mpi_broadcast() -> None:
        if engine.rank == 0:
            total[:] = flat
        world.Bcast(total)

    def broadcast() -> list[np.ndarray]:
        return [engine.broadcast(array, name="array") for array in arrays]

    if call == "broadcast":
        return mpi_broadcast, broadcast, total
    of_mpi = functools.partial(world.Allreduce, flat, total)
    return of_mpi, functools.partial(engine.grouped_allreduce, arrays, name="arrays"), total


def measure_horovod(job: dict[str, Any]) -> Found:
    """Take part in Horovod's; empty but on its first rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    call, runs = job["call"], job["runs"]
    found: Found = {}
    for size in job["bytes"]:
        tensors = [tf.constant(array) for array in arrays_of(size, hvd.rank())]
        allreduce = functools.partial(hvd.grouped_allreduce, tensors, op=hvd.Sum, name="arrays")
        ways: dict[str, Way] = {
            "allreduce": allreduce,
            "broadcast": functools.partial(broadcast_all, hvd, tensors),
        }

        def barrier() -> None:
            hvd.allreduce(tf.zeros([1]), name="barrier")

        time_ways({"Horovod": ways[call]}, size, runs, barrier, found)
    return found if hvd.rank() == 0 else {}


def broadcast_all(hvd: Any, tensors: list[Any]) -> list[Any]:
    """Broadcast tensors from rank 0, one after the other."""
    return [hvd.broadcast(tensor, 0, name=f"array {n}") for n, tensor in enumerate(tensors)]


def count_bytes(ways: dict[str, Way], size: int, world: Any, local_rank: int) -> None:
    """Print, on the chief, how many bytes left the host that sent most, in a call of each way."""
    for name, way in ways.items():
        world.Barrier()
        before = bytes_sent()
        way()
        world.Barrier()
        most = max(world.allgather(bytes_sent() - before if local_rank == 0 else 0))
        if world.Get_rank() == 0:
            print(f"{name}, {size} bytes: {most} bytes left a host", flush=True)


def bytes_sent() -> int:
    """What this host has sent over its link since it was built, with all headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise SystemExit("there is no eth0")


def arrays_of(size: int, rank: int, count: int = 0) -> list[np.ndarray]:
    """Return float32 of so many bytes in all, in ``count`` arrays; 0: in several if it is large."""
    count = count or (1 if size <= ONE_ARRAY_BYTES else ARRAYS)
    chance = np.random.default_rng(rank)
    return [chance.random(max(1, size // 4 // count), np.float32) for _ in range(count)]


def time_ways(
    ways: dict[str, Way], size: int, runs: int, barrier: Callable[[], object], found: Found
) -> None:
    """Add the seconds of a call of each way to what was found; the first run is thrown away."""
    calls = max(1, min(MOST_CALLS, BYTES_PER_RUN // size))
    for run in range(runs + 1):
        for name, way in ways.items():
            barrier()
            begun_s = time.perf_counter()
            for _ in range(calls):
                way()
            if calls == 1:
                barrier()
            taken_s = (time.perf_counter() - begun_s) / calls
            if run:
                found.setdefault(name, {}).setdefault(size, []).append(taken_s)


class Link:
    """A connection to the next host and one from the host before, for one rank of each host."""

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

    def round_trip_s(self) -> float:
        """The time of a byte to the next host and an answer, by two such steps around the ring."""
        if self._idle:
            return 0.0
        times = []
        for _ in range(ROUND_TRIPS):
            begun_s = time.perf_counter()
            for _ in range(2):
                self._out.sendall(b"?")
                self._in.recv(1)
            times.append(time.perf_counter() - begun_s)
        return statistics.median(times)

    def move(self, nbytes: int) -> None:
        """Send so many bytes, and receive as many."""
        if self._idle:
            return
        sender = threading.Thread(target=self._out.sendall, args=[bytes(nbytes)])
        sender.start()
        buffer = bytearray(1 << 20)
        left = nbytes
        while left:
            received = self._in.recv_into(buffer, min(left, len(buffer)))
            if not received:
                raise ConnectionError(f"The host before closed its link, {left} bytes too early.")
            left -= received
        sender.join(LINK_TIMEOUT_S)


if __name__ == "__main__":
    main()
