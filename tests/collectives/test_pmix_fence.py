"""A fence among the ranks of an srun."""

from __future__ import annotations

import re
import sys

import pytest

from hvdtrain.collectives.pmix_fence import fence
from tests.launch.jobs import ON_CLUSTER
from tests.testbed.cluster import Cluster

SCRIPT = """
import os
import time

from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import mpi_start

topology = read_topology(os.environ)
fence, times = mpi_start.fence, []


def watched():
    time.sleep(topology.rank == 0)
    times.append(time.monotonic())
    assert fence()
    times.append(time.monotonic())


mpi_start.fence = watched
mpi_start.start_mpi(topology)
print("{} came {} left {}\\n".format(topology.rank, *times), end="", flush=True)
"""


def test_there_is_none_without_mpi() -> None:
    assert not fence()


@pytest.mark.cluster
def test_all_wait_for_the_last_before_any_sends(cluster: Cluster) -> None:
    """Two ranks on each of two hosts."""
    script = cluster.folder / "fence.py"
    script.write_text(SCRIPT)
    env = {**ON_CLUSTER, "OPAL_PREFIX": sys.prefix, "PMIX_MCA_psec": "native"}
    argv = ["srun", "--mpi=pmix", "-N2", "-n4", sys.executable, str(script)]
    done = cluster.run(argv, env=env, timeout_s=60)
    assert done.returncode == 0, done
    ranks = re.findall(r"(\d) came (\S+) left (\S+)", done.stdout)
    assert sorted(rank for rank, _, _ in ranks) == list("0123"), done
    assert max(float(came) for _, came, _ in ranks) <= min(float(left) for _, _, left in ranks)
