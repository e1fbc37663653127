"""A call between hosts beside MPI's own, Horovod's, and what plain TCP makes of the links.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --call broadcast --bytes 104857600
    python benchmarks/between_hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --queue-ms 5
    python benchmarks/between_hosts.py --bytes 4 1024 16384 65536 --horovod
    python benchmarks/between_hosts.py --bytes 4 4096 65536 --round-trip-ms 1

Hosts are those of the tests, on this machine: it needs root, and the packages of
tests/testbed/packages.txt. Links are shaped by tbf in both directions, and on request a program
keeps what is sent for half a round trip. Each way takes its turn,
with float32 of so many bytes as a result, above 1 MiB in 40 arrays; TCP moves as many bytes as
leave a host at least, 2 (n - 1) / n of them for an allreduce of n hosts and all
for a broadcast, to the next host and from the one before at the same time.
Horovod runs in jobs of its own between the others', in the environment that the tests use
(make environments NAMES=horovod).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from cluster_jobs import HOROVOD, HVDTRAIN, run_on_hosts, shaped_cluster

WORKER = Path(__file__).with_name("link_calls.py")

Found = dict[str, dict[int, list[float]]]


def main() -> None:
    """Run the comparison, and print a table for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", default="allreduce", choices=("allreduce", "broadcast"))
    parser.add_argument("--hosts", type=int, default=4, help="default %(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default %(default)s")
    parser.add_argument("--rate", default="200mbit", help="of each link; default %(default)s")
    parser.add_argument("--queue-ms", type=int, default=20, help="before it; default %(default)s")
    parser.add_argument(
        "--round-trip-ms", type=float, default=0, help="that links add; for small arrays; default 0"
    )
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[64 << 20], help="of arrays; default %(default)s"
    )
    parser.add_argument(
        "--compression",
        nargs="+",
        default=[],
        choices=("fp16", "bf16", "int8"),
        help="try an allreduce in these forms, too",
    )
    parser.add_argument("--runs", type=int, default=5, help="of a way in a job; default 5")
    parser.add_argument("--jobs", type=int, default=1, help="default %(default)s")
    parser.add_argument("--horovod", action="store_true", help="compare with Horovod, too")
    asked = parser.parse_args()
    if asked.compression and asked.call != "allreduce":
        parser.error("--compression is of an allreduce")
    found = run(asked)
    print(
        f"{asked.call}: {asked.hosts} hosts, {asked.ranks_per_host} ranks each, "
        f"links of {asked.rate}, queues of {asked.queue_ms} ms, "
        f"{asked.round_trip_ms:g} ms added to a round trip"
    )
    for size in asked.bytes:
        print_table(size, {way: times[size] for way, times in found.items() if size in times})


def print_table(size: int, found: dict[str, list[float]]) -> None:
    """The times of all ways, and how many times as fast as TCP and MPI they are."""
    others = [way for way in found if way == "TCP" or way.startswith("MPI")]
    print(f"\n{size} bytes\n")
    print("| way | median of runs | shortest to longest |", *(f"speed of {o} |" for o in others))
    print("|---|---|---|" + "---|" * len(others))
    for way, times in found.items():
        middle = median(times)
        cells = [f"{median(found[other]) / middle:.0%} |" for other in others]
        spread = f"{min(times) * 1e3:.3f} to {max(times) * 1e3:.3f} ms"
        print(f"| {way} | {middle * 1e3:.3f} ms | {spread} |", *cells)


def run(asked: argparse.Namespace) -> Found:
    """Build the hosts, and run the jobs on them; seconds of each run by way and size."""
    names = ("call", "bytes", "runs", "hosts", "compression")
    job = json.dumps({name: getattr(asked, name) for name in names})
    libraries = [HVDTRAIN, HOROVOD] if asked.horovod else [HVDTRAIN]
    found: Found = {}
    links = (asked.rate, asked.queue_ms, asked.round_trip_ms)
    with shaped_cluster(asked.hosts, *links) as hosts:
        for library in libraries * asked.jobs:
            program = [WORKER, library, job]
            by_way = run_on_hosts(*hosts, library, program, asked.ranks_per_host)
            for way, by_size in by_way.items():
                for size, times in by_size.items():
                    found.setdefault(way, {}).setdefault(int(size), []).extend(times)
    return found


if __name__ == "__main__":
    main()
