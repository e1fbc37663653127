"""Compare hvdtrain with MPI, Horovod, PyTorch, TensorFlow's ring and one process.

    make environments NAMES="torch horovod-optimised"
    make bench
    python benchmarks/against_peers.py --quick
    python benchmarks/against_peers.py --what allreduce startup --where host --repeat 5

Each candidate ("way") runs in its own jobs, and candidates take turns: A B C, A B C. Tables show
medians and ranges. Missing candidates are listed with the command that installs them. The cluster
is the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from common import make_parser
from peers.candidates import MEASURES, WAYS, find_ways
from peers.jobs import FULL, HOSTS, QUICK, RANKS, THREADS, make_plan, run_plan, say
from peers.tables import report

from hvdtrain.bench.machine import describe_machine, machine_line
from hvdtrain.config.fields import argument, positive_int
from hvdtrain.text import plural
from tests.environments import missing_environment
from tests.testbed.requirements import missing_requirements


def main() -> int:
    """Run the comparison, and print and write its tables."""
    arguments = parse(sys.argv[1:])
    names = [name for name in WAYS if name in arguments.ways]
    ways, unavailable = find_ways(names, missing_environment)
    places = {
        "host": f"{RANKS} ranks on one host",
        "cluster": f"{HOSTS} hosts with a rank each, links of {arguments.rate}",
    }
    places = {where: places[where] for where in arguments.where}
    if "cluster" in places and (reason := missing_requirements()):
        say(f"the test cluster is not available: {reason}")
        del places["cluster"]
    for reason in unavailable.values():
        say(f"not measured: {reason}")
    sizes = QUICK if arguments.quick else FULL
    repeat = 1 if arguments.quick else arguments.repeat
    # The backend of all candidates, which the description of the machine contains.
    os.environ["KERAS_BACKEND"] = THREADS["KERAS_BACKEND"]
    machine = describe_machine()
    say(machine_line(machine))
    start_s = time.monotonic()
    # sys.exit also ends the running job.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    plan = make_plan(arguments.what, list(places), ways, repeat, sizes)
    entries = run_plan(plan, HOSTS, arguments.rate)
    text = report(arguments.what, ways, unavailable, entries, sizes, places)
    jobs = plural(repeat, "job")
    head = f"{machine_line(machine)}\n\nMedians of {jobs} of each candidate (least to most)."
    if arguments.quick:
        head += " A quick run, whose figures are not meaningful."
    document = f"{head}\n\n{text}\n"
    print(f"\n{document}")
    say(f"{len(entries)} jobs in {(time.monotonic() - start_s) / 60:.1f} minutes")
    if arguments.markdown:
        arguments.markdown.write_text(document)
    if arguments.json:
        content = {
            "machine": machine,
            "arguments": sys.argv[1:],
            "sizes": sizes._asdict(),
            "ways": {name: way._asdict() for name, way in ways.items()},
            "unavailable": unavailable,
            "repetitions": entries,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if any("error" in entry for entry in entries) else 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--what", nargs="+", choices=MEASURES, default=list(MEASURES))
    places = ("host", "cluster")
    parser.add_argument("--where", nargs="+", choices=places, default=list(places))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--repeat",
        type=argument(positive_int),
        default=3,
        help="jobs of each candidate; default %(default)s",
    )
    parser.add_argument(
        "--rate", default="200mbit", help="speed of the cluster's links; default %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="one small job of each candidate")
    parser.add_argument("--json", type=Path, help="write the figures of every job to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
