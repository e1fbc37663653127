"""Exchange of data between sixteen ranks on sixteen hosts over real links."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import numpy as np
import pytest

from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create
from hvdtrain.config import read_settings
from tests.harness.forkserver import SERVERS, ForkServers
from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import ON_CLUSTER
from tests.testbed.cluster import Cluster

HOSTS = 16
# One round, two rounds, and segments with an incomplete last one.
SIZES = (1, 1000, 20_000, 700_001)


def main() -> None:
    """Compare results on each rank. Sums of integers are exact in any order."""
    engine: Any = create(read_topology(os.environ), read_settings(os.environ))
    everyone = range(engine.size)
    digest = hashlib.sha256()
    for dtype in ("float32", "float16"):
        for size in SIZES:
            of_rank_0 = (np.arange(size) % 7).astype(dtype)
            array = of_rank_0 + engine.rank
            total = engine.allreduce(array, name="numbers")
            np.testing.assert_array_equal(total, of_rank_0 * engine.size + sum(everyone))
            digest.update(total.tobytes())
            rows = engine.allgather(array[: engine.rank], name="rows")
            expected = np.concatenate([of_rank_0[:rank] + rank for rank in everyone])
            np.testing.assert_array_equal(rows, expected)
            of_fifth = engine.broadcast(array, root=5, name="numbers of rank 5")
            np.testing.assert_array_equal(of_fifth, of_rank_0 + 5)
    third = np.full(1000, 1 / 3, "float32") * (engine.rank + 1)
    digest.update(engine.allreduce(third, "average", name="rounded").tobytes())
    digests = engine.allgather_object(digest.hexdigest(), name="digest")
    if engine.rank == 0:
        print(f"{engine.size} ranks have {len(set(digests))} result")
    engine.transport.leave()


@pytest.mark.more
@pytest.mark.cluster
def test_sixteen_ranks_on_sixteen_hosts(fork_servers: ForkServers) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with Cluster(size=HOSTS, shared=[fork_servers.folder]) as cluster:
        hosts = ",".join(f"{host}:1" for host in cluster.hosts)
        done = cluster.run(
            [
                *(f"{sys.prefix}/bin/mpirun", "--prefix", sys.prefix, "-H", hosts),
                *("-x", SERVERS),
                *(*fork_servers.python(), "-m", "tests.collectives.test_sixteen_hosts"),
            ],
            env={**ON_CLUSTER, **root, "OMPI_MCA_osc": "^ucx"},
            cwd=REPOSITORY,
            timeout_s=100,
        )
    assert done.returncode == 0, done
    assert "16 ranks have 1 result" in done.stdout


if __name__ == "__main__":
    main()
