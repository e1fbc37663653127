"""Compare a call between hosts with MPI and Horovod.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --call broadcast --bytes 104857600
    python benchmarks/between_hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --queue-ms 5
    python benchmarks/between_hosts.py --bytes 4 1024 16384 65536 --horovod
    python benchmarks/between_hosts.py --bytes 4 4096 65536 --round-trip-ms 1

The program uses the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt. tbf shapes the links in both directions; --round-trip-ms adds a delay.
The jobs of candidates take turns. They measure float32 arrays of --bytes in total, above 1 MiB in
40 arrays, and MPI with one array. The table shows medians and ranges of the jobs' medians.
"""

from __future__ import annotations

import argparse
import sys

from common import make_parser
from peers.candidates import WAYS
from peers.jobs import Task, run_plan
from peers.tables import Column, collect, table

from hvdtrain.bench.results import format_seconds

NAMES_OF_MPI = {"allreduce": "MPI_Allreduce", "broadcast": "MPI_Bcast"}
# Larger data is divided into several arrays, like gradients.
ONE_ARRAY_BYTES = 1 << 20
ARRAYS = 40


def main() -> int:
    arguments = parse()
    call, hosts, ranks_per_host = arguments.call, arguments.hosts, arguments.ranks_per_host
    candidates = {NAMES_OF_MPI[call]: ("mpi", "none"), "hvdtrain": ("hvdtrain", "none")}
    candidates |= {f"hvdtrain, {form}": ("hvdtrain", form) for form in arguments.compression}
    if arguments.horovod:
        candidates["Horovod"] = ("horovod-mpi", "none")
    plan = []
    for number in range(1, arguments.jobs + 1):
        for name, (way, wire) in candidates.items():
            large = 1 if way == "mpi" else ARRAYS
            cases = {
                str(size): (size, 1 if size <= ONE_ARRAY_BYTES else large)
                for size in arguments.bytes
            }
            job = {"library": WAYS[way].library, "cases": cases, "runs": arguments.runs}
            job |= {"call": call, "wire": wire}
            task = Task(call, "cluster", name, WAYS[way], number, hosts * ranks_per_host, job)
            plan.append(task)
    links = (arguments.rate, arguments.queue_ms, arguments.round_trip_ms)
    entries = run_plan(plan, hosts, *links)
    print(
        f"{call}: {hosts} hosts, {ranks_per_host} ranks each, links of {arguments.rate}, queues of "
        f"{arguments.queue_ms} ms, {arguments.round_trip_ms:g} ms added to a round trip\n"
    )
    columns = [Column(str(size), f"{size} bytes", format_seconds) for size in arguments.bytes]
    print(table({name: name for name in candidates}, collect(entries, call, "cluster"), columns))
    return 1 if any("error" in entry for entry in entries) else 0


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--call", default="allreduce", choices=NAMES_OF_MPI)
    parser.add_argument("--hosts", type=int, default=4, help="default %(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default %(default)s")
    parser.add_argument("--rate", default="200mbit", help="speed of each link; default %(default)s")
    parser.add_argument(
        "--queue-ms", type=int, default=20, help="queue of each link; default %(default)s"
    )
    parser.add_argument("--round-trip-ms", type=float, default=0, help="additional; default 0")
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[64 << 20], help="array sizes; default %(default)s"
    )
    forms = ("fp16", "bf16", "int8")
    parser.add_argument(
        "--compression", nargs="+", default=[], choices=forms, help="also measure compressions"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs per job; default %(default)s")
    parser.add_argument(
        "--jobs", type=int, default=3, help="jobs of each candidate; default %(default)s"
    )
    parser.add_argument("--horovod", action="store_true", help="also compare with Horovod")
    arguments = parser.parse_args()
    if arguments.call != "allreduce" and (arguments.compression or arguments.horovod):
        parser.error("--compression and --horovod require --call allreduce")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
