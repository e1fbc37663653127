"""hvdtrain beside MPI, Horovod, PyTorch, TensorFlow's ring, and one process, all in the same run.

    make environments NAMES="torch horovod-optimised"
    make bench
    python benchmarks/against_peers.py --quick
    python benchmarks/against_peers.py --what allreduce startup --where host --repeat 5

Each way is a job of its own, and ways take turns: A B C, A B C. Tables have medians, and from the
least to the most. What this machine does not have is named, with how to get it. The cluster is
that of the tests, on this machine: it needs root, and the packages of tests/testbed/packages.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

from peers.plan import RANKS, full_sizes, make_plan, quick_sizes
from peers.running import run_plan
from peers.summary import report
from peers.ways import MEASURES, WAYS, find_ways

from hvdtrain.bench.machine import describe_machine, machine_line
from hvdtrain.launch.hosts import whole_number
from tests.environments import missing_environment
from tests.testbed.requirements import missing_requirements

HOSTS = 4
QUEUE_MS = 20


def main() -> int:
    """Run what was asked for, print tables, and write what was asked for."""
    asked = parse(sys.argv[1:])
    names = [name for name in WAYS if name in asked.ways]
    ways, not_there = find_ways(names, missing_environment)
    wheres = list(asked.where)
    if "cluster" in wheres and (reason := missing_requirements()):
        say(f"no cluster here: {reason}")
        wheres.remove("cluster")
    for reason in not_there.values():
        say(f"not measured: {reason}")
    sizes = quick_sizes() if asked.quick else full_sizes()
    repeat = 1 if asked.quick else asked.repeat
    plan = make_plan(asked.what, wheres, ways, repeat, sizes)
    machine = describe_machine()
    say(machine_line(machine))
    begun_s = time.monotonic()
    # The job under way ends, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    entries = run_plan(plan, asked.rate, QUEUE_MS, HOSTS, say)
    links = f"{HOSTS} hosts with a rank each, links of {asked.rate}"
    text = report(asked.what, wheres, ways, not_there, entries, sizes, RANKS, links)
    jobs = "One job of each way." if repeat == 1 else f"Medians of {repeat} jobs (least to most)."
    head = f"{machine_line(machine)}\n\n{jobs}"
    if asked.quick:
        head += " A quick run: its figures mean little."
    whole = f"{head}\n\n{text}\n"
    print(f"\n{whole}")
    say(f"{len(entries)} jobs in {(time.monotonic() - begun_s) / 60:.1f} minutes")
    if asked.markdown:
        asked.markdown.write_text(whole)
    if asked.json:
        content = {
            "machine": machine,
            "asked": {name: value for name, value in vars(asked).items() if name in FLAGS},
            "sizes": dataclasses.asdict(sizes),
            "ways": {name: dataclasses.asdict(way) for name, way in ways.items()},
            "not_there": not_there,
            "repetitions": entries,
        }
        asked.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if any("error" in entry for entry in entries) else 0


FLAGS = ("what", "where", "ways", "repeat", "rate", "quick")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=MEASURES, default=list(MEASURES))
    places = ("host", "cluster")
    parser.add_argument("--where", nargs="+", choices=places, default=list(places))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--repeat", type=whole_number, default=3, help="jobs of each way; default %(default)s"
    )
    parser.add_argument(
        "--rate", default="200mbit", help="of the cluster's links; default %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="one small job of each way")
    parser.add_argument("--json", type=Path, help="write every job's figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    return parser.parse_args(arguments)


def say(line: str) -> None:
    """Tell what goes on, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
