"""Compare a call between hosts with MPI, Horovod and plain TCP.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --call broadcast --bytes 104857600
    python benchmarks/between_hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --queue-ms 5
    python benchmarks/between_hosts.py --bytes 4 1024 16384 65536 --horovod
    python benchmarks/between_hosts.py --bytes 4 4096 65536 --round-trip-ms 1

The program uses the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt. tbf shapes the links in both directions; --round-trip-ms adds a delay.
Candidates take turns with float32 arrays of --bytes in total, above 1 MiB in 40 arrays. TCP moves
the bytes that must leave a host, 2 (n - 1) / n of an allreduce on n hosts and all of a broadcast,
around a ring. Horovod runs in separate jobs (make environments NAMES=horovod).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from cluster_jobs import HOROVOD, HVDTRAIN, run_on_hosts, shaped_cluster

WORKER = Path(__file__).with_name("link_calls.py")

Times = dict[str, dict[int, list[float]]]


def main() -> None:
    """Run the comparison and print a table for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", default="allreduce", choices=("allreduce", "broadcast"))
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
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of each candidate per job; default 5"
    )
    parser.add_argument("--jobs", type=int, default=1, help="default %(default)s")
    parser.add_argument("--horovod", action="store_true", help="also compare with Horovod")
    arguments = parser.parse_args()
    if arguments.call != "allreduce" and (arguments.compression or arguments.horovod):
        parser.error("--compression and --horovod require --call allreduce")
    results = run(arguments)
    print(
        f"{arguments.call}: {arguments.hosts} hosts, {arguments.ranks_per_host} ranks each, "
        f"links of {arguments.rate}, queues of {arguments.queue_ms} ms, "
        f"{arguments.round_trip_ms:g} ms added to a round trip"
    )
    for size in arguments.bytes:
        print_table(size, {way: times[size] for way, times in results.items() if size in times})


def print_table(size: int, times_by_way: dict[str, list[float]]) -> None:
    """Print the times of all candidates, and their speed relative to TCP and MPI."""
    others = [way for way in times_by_way if way == "TCP" or way.startswith("MPI")]
    print(f"\n{size} bytes\n")
    print("| candidate | median | range |", *(f"speed of {o} |" for o in others))
    print("|---|---|---|" + "---|" * len(others))
    for way, times in times_by_way.items():
        middle = median(times)
        cells = [f"{median(times_by_way[other]) / middle:.0%} |" for other in others]
        spread = f"{min(times) * 1e3:.3f} to {max(times) * 1e3:.3f} ms"
        print(f"| {way} | {middle * 1e3:.3f} ms | {spread} |", *cells)


def run(arguments: argparse.Namespace) -> Times:
    """Run the jobs on the test cluster, and return seconds per run by candidate and size."""
    names = ("call", "bytes", "runs", "hosts", "compression")
    job = json.dumps({name: getattr(arguments, name) for name in names})
    libraries = [HVDTRAIN, HOROVOD] if arguments.horovod else [HVDTRAIN]
    times_by_way: Times = {}
    links = (arguments.rate, arguments.queue_ms, arguments.round_trip_ms)
    with shaped_cluster(arguments.hosts, *links) as hosts:
        for library in libraries * arguments.jobs:
            program = [WORKER, library, job]
            by_way = run_on_hosts(*hosts, library, program, arguments.ranks_per_host)
            for way, by_size in by_way.items():
                for size, times in by_size.items():
                    times_by_way.setdefault(way, {}).setdefault(int(size), []).extend(times)
    return times_by_way


if __name__ == "__main__":
    main()
