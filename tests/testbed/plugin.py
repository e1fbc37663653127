"""The fixture and the marker of the test cluster.

``cluster``
    Fixture: a ``Cluster`` of four hosts for the whole session, created on first use. Tests restore
    what they cut or stop.

``@pytest.mark.cluster``
    The test needs the cluster; set for tests with the fixture. Without the cluster's requirements
    they are skipped, or fail if ``HVDTRAIN_TEST_REQUIRE`` contains ``cluster``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.forkserver import ForkServers
from tests.harness.required import skip_or_fail
from tests.testbed.cluster import Cluster
from tests.testbed.requirements import missing_requirements


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs the cluster of four hosts")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker by fixture, before tests are sorted and selected."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail before any fixture is set up."""
    if _needs_cluster(item) and (reason := missing_requirements()):
        skip_or_fail("cluster", reason)


@pytest.fixture(scope="session")
def cluster(fork_servers: ForkServers) -> Iterator[Cluster]:
    """The cluster of four hosts for all tests of the session."""
    with Cluster(shared=[fork_servers.folder]) as built:
        yield built


def _needs_cluster(item: pytest.Item) -> bool:
    return item.get_closest_marker("cluster") is not None
