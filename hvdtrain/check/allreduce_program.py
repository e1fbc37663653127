"""The program that ``hvdtrain check`` starts on all ranks: one small allreduce, timed.

It needs no TensorFlow, whose import would take most of the time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys

import numpy as np

from hvdtrain.bench.timing import bus_bandwidth, time_in_turn
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create, exit_hooks
from hvdtrain.config import read_settings
from hvdtrain.monitor import report

__all__ = ["main"]

NBYTES = 4_000_000
REPETITIONS = 3
# Starting MPI has no time-out of its own.
MOST_S = 90.0


def main() -> None:
    """Reduce, and let the chief print what was found, behind the mark in the first argument."""
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    topology = read_topology(os.environ)
    collectives = create(topology, read_settings(os.environ))
    if collectives.size > 1:
        # Ends MPI with this process, and the other ranks when this one fails.
        exit_hooks.install(collectives, report.failed)
    ranks = collectives.size
    small, large = np.ones(1, np.float32), np.ones(NBYTES // 4, np.float32)
    name = "hvdtrain check"
    mine = large * (topology.rank + 1)
    right = bool((collectives.allreduce(mine, name=name) == ranks * (ranks + 1) / 2).all())
    everywhere = bool(collectives.allreduce(np.array([right]), "min", name=name)[0])
    found = time_in_turn(
        collectives,
        {
            "small": lambda: collectives.allreduce(small, name=name),
            "large": lambda: collectives.allreduce(large, name=name),
        },
        repetitions=REPETITIONS,
    )
    if topology.is_chief:
        best_s = found["large"].best_s
        result = {
            "ranks": ranks,
            "engine": collectives.kind,
            "right": everywhere,
            "nbytes": large.nbytes,
            "best_s": best_s,
            "latency_s": found["small"].best_s,
            "bus_bandwidth": bus_bandwidth(large.nbytes, best_s, ranks),
        }
        print(sys.argv[1] + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
