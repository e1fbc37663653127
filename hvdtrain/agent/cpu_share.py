"""The share of a host's cores that a rank takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdtrain.agent.messages import BIND
from hvdtrain.cluster.placement import share_of_cores
from hvdtrain.cluster.topology import Topology

__all__ = ["take_cores"]


def take_cores(place: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """Bind this process to its rank's share of the cores; the variables that go with it.

    Every library would otherwise compute with as many threads as the host has cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    # Where Slurm gave the job fewer, but binds nobody, it can't be told which they are.
    allowed = min(len(cores), int(environ.get("SLURM_CPUS_ON_NODE", len(cores))))
    share = share_of_cores(place.local_rank, place.local_size, allowed) or (0, 0)
    if place.local_size <= allowed == len(cores) and environ.get(BIND) != "0":
        os.sched_setaffinity(0, cores[share[0] : share[1] + 1])
    threads = str(share[1] - share[0] + 1)
    return {"TF_NUM_INTRAOP_THREADS": threads, "OMP_NUM_THREADS": threads}
