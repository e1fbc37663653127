"""An allreduce between hosts beside MPI's own, and beside what plain TCP makes of the same links.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --queue-ms 5

Hosts are those of the tests, on this machine: it needs root, and the packages of
tests/testbed/packages.txt. Links are shaped by tbf in both directions. Each way moves arrays of
float32 in turn; TCP moves as many bytes as leave a host at least, 2 (n - 1) / n of them with n
hosts, to the next host and from the one before at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
ARRAYS = 40
TCP_PORT = 45454
JOB_TIMEOUT_S = 900.0
# For one read or write of a socket, and for the other host to connect.
LINK_TIMEOUT_S = 60.0


def main() -> None:
    """Run the comparison, or one rank's part of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, choices=(2, 3, 4), help="default 4")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default %(default)s")
    parser.add_argument("--rate", default="200mbit", help="of each link; default %(default)s")
    parser.add_argument("--queue-ms", type=int, default=20, help="before it; default %(default)s")
    parser.add_argument("--mib", type=float, default=64.0, help="of arrays; default %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="of each way; default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        found = measure(asked.mib, asked.runs, asked.hosts)
        if found:
            print(json.dumps(found))
        return
    found = run(asked)
    reference = median(found["TCP"])
    print(
        f"{asked.mib:g} MiB of float32 in {ARRAYS} arrays, {asked.hosts} hosts, "
        f"{asked.ranks_per_host} ranks each, links of {asked.rate}, queues of {asked.queue_ms} ms\n"
    )
    print("| way | median of runs | shortest to longest | of TCP's speed |\n|---|---|---|---|")
    for way, times in found.items():
        spread = f"{min(times):.3f} to {max(times):.3f} s"
        print(f"| {way} | {median(times):.3f} s | {spread} | {reference / median(times):.0%} |")
    if asked.json:
        figures = {
            name: value for name, value in vars(asked).items() if name not in ("json", "rank")
        }
        asked.json.write_text(json.dumps({**figures, "seconds": found}, indent=2) + "\n")


def run(asked: argparse.Namespace) -> dict[str, list[float]]:
    """Build the hosts, and run the ranks on them; seconds of each run by way."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.launch.jobs import ON_CLUSTER
    from tests.testbed.cluster import Cluster

    hosts = Cluster.hosts[: asked.hosts]
    mpirun = Path(sys.executable).with_name("mpirun")
    options = ["--mib", asked.mib, "--runs", asked.runs, "--hosts", asked.hosts]
    argv = [
        *(mpirun, "--prefix", sys.prefix),
        *("--map-by", f"ppr:{asked.ranks_per_host}:node:OVERSUBSCRIBE"),
        *("-H", ",".join(f"{host}:{asked.ranks_per_host}" for host in hosts)),
        *(sys.executable, __file__, "--rank", *map(str, options)),
    ]
    environ = {
        **ON_CLUSTER,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",
    }
    with Cluster(shared=[]) as cluster:
        cluster.shape(asked.rate, asked.queue_ms)
        done = cluster.run(argv, env=environ, timeout_s=JOB_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nthe ranks ended with {done.returncode}")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(mib: float, runs: int, hosts: int) -> dict[str, list[float]]:
    """Let this rank take part in every way; the times on the chief, empty on the others."""
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.collectives.mpi_start import start_mpi
    from hvdtrain.config import read_settings

    topology = read_topology(os.environ)
    mpi = start_mpi(topology)
    world = mpi.COMM_WORLD
    engine: Any = create(topology, read_settings(os.environ))
    items = int(mib * 2**20 / 4) // ARRAYS
    chance = np.random.default_rng(engine.rank)
    arrays = [chance.random(items, np.float32) for _ in range(ARRAYS)]
    flat = np.concatenate(arrays)
    total = np.empty_like(flat)
    sums: list[np.ndarray] = []
    link = Link(world, topology.local_rank, topology.local_size, hosts)
    ways: dict[str, Callable[[], object]] = {
        "TCP": lambda: link.move(2 * (hosts - 1) * flat.nbytes // hosts),
        "MPI_Allreduce": lambda: world.Allreduce(flat, total),
        "hvdtrain": lambda: sums.extend(engine.grouped_allreduce(arrays, name="arrays")),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            sums.clear()
            world.Barrier()
            begun_s = time.perf_counter()
            way()
            world.Barrier()
            found[name].append(time.perf_counter() - begun_s)
        if not np.allclose(np.concatenate(sums), total, rtol=1e-4):
            raise SystemExit("hvdtrain's sums are not MPI's")
    engine.transport.leave()
    return found if engine.rank == 0 else {}


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
            self._in, _ = listener.accept()
            self._in.settimeout(LINK_TIMEOUT_S)
            listener.close()

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
