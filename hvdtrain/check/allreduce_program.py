"""The program that ``hvdtrain check`` runs on all ranks: a short, timed allreduce.

It does not use TensorFlow, because importing TensorFlow would take most of the time.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import numpy as np

from hvdtrain.bench.results import format_seconds
from hvdtrain.bench.timing import bus_bandwidth, time_in_turn
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create, exit_hooks
from hvdtrain.config import read_settings
from hvdtrain.monitor import report

__all__ = ["format_allreduce", "main"]

NBYTES = 4_000_000
REPETITIONS = 3
# The program ends after this time, because starting MPI may hang.
TIMEOUT_S = 90.0


def main() -> None:
    """Run the allreduce on all ranks.

    The chief prints one line, which begins with the first argument of this program. If all sums are
    correct, the rest of the line contains the times.
    """
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    topology = read_topology(os.environ)
    engine = create(topology, read_settings(os.environ))
    if engine.size > 1:
        # The hooks end MPI when this process ends, and end the other ranks if this one fails.
        exit_hooks.install(engine, report.failed)
    ranks = engine.size
    small, large = np.ones(1, np.float32), np.ones(NBYTES // 4, np.float32)
    name = "hvdtrain check"
    total = engine.allreduce(large * (topology.rank + 1), name=name)
    is_correct = np.array([(total == ranks * (ranks + 1) / 2).all()])
    all_correct = bool(engine.allreduce(is_correct, "min", name=name)[0])
    times = time_in_turn(
        engine,
        {
            "small": lambda: engine.allreduce(small, name=name),
            "large": lambda: engine.allreduce(large, name=name),
        },
        repetitions=REPETITIONS,
    )
    if topology.is_chief:
        text = format_allreduce(
            engine.kind, ranks, large.nbytes, times["large"].best_s, times["small"].best_s
        )
        print(sys.argv[1] + (text if all_correct else ""), flush=True)


def format_allreduce(engine: str, ranks: int, nbytes: int, best_s: float, latency_s: float) -> str:
    """Format the time and bandwidths for ``nbytes``, and the time for four bytes."""
    return (
        f"allreduce over {ranks} ranks ({engine}): {nbytes / 1e6:.1f} MB in "
        f"{format_seconds(best_s)}, {nbytes / best_s / 1e9:.2f} GB/s "
        f"(bus {bus_bandwidth(nbytes, best_s, ranks) / 1e9:.2f} GB/s); "
        f"4 bytes in {format_seconds(latency_s)}"
    )


if __name__ == "__main__":
    main()
