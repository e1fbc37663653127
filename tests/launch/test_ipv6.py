"""``hvdtrain run`` on hosts that are named by their IPv6 addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.jobs import HVDTRAIN, ON_CLUSTER, program
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

DEVICES = {"head": "br0", "node1": "eth0", "node2": "eth0"}
ADDRESSES = {"head": "fd77::fe", "node1": "fd77::1", "node2": "fd77::2"}


@pytest.fixture
def addresses(cluster: Cluster) -> Iterator[dict[str, str]]:
    """IPv6 addresses beside those that the hosts have."""
    for change in ("add", "del"):
        for host, device in DEVICES.items():
            words = ["addr", change, f"{ADDRESSES[host]}/64", "dev", device]
            if change == "add":
                words.append("nodad")
            done = cluster.run(["ip", "-6", *words], host=host, timeout_s=10)
            assert done.returncode == 0, done
        if change == "add":
            yield ADDRESSES


def test_hosts_named_by_address(cluster: Cluster, addresses: dict[str, str]) -> None:
    hosts = f"[{addresses['node1']}]:1,[{addresses['node2']}]:2"
    body = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(rank))"
    done = cluster.run(
        [*HVDTRAIN, "-H", hosts, "--", *program(body)],
        env=ON_CLUSTER,
        timeout_s=60,
    )
    assert done.returncode == 0, done
    lines = sorted(done.stdout.splitlines())
    assert [line.partition("] ")[2] for line in lines] == ["3"] * 3, done
    assert [line.split()[1].rstrip("]") for line in lines] == ["node1", "node2", "node2"]
