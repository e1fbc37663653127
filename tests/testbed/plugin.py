"""What a test can ask for.

``cluster``
    Fixture: the ``Cluster`` of four hosts, built when the first test asks for it and taken down
    at the end of the session. A test puts back what it cuts or stops.

``@pytest.mark.cluster``
    The test needs such a cluster; whoever uses the fixture has the marker. Where the cluster can't
    be built they are skipped, or fail where ``HVDTRAIN_TEST_REQUIRE`` contains ``cluster``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.forkserver import ForkServers
from tests.harness.required import do_without
from tests.testbed.cluster import Cluster
from tests.testbed.requirements import missing_requirements


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs the cluster of four hosts")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by fixture, before the harness sorts and tests are chosen by their markers."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail, before any fixture is set up."""
    if _needs_cluster(item) and (reason := missing_requirements()):
        do_without("cluster", reason)


@pytest.fixture(scope="session")
def cluster(fork_servers: ForkServers) -> Iterator[Cluster]:
    """The cluster of four hosts; one for all tests of the session."""
    with Cluster(shared=[fork_servers.folder]) as built:
        yield built


def _needs_cluster(item: pytest.Item) -> bool:
    return item.get_closest_marker("cluster") is not None
