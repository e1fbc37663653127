"""The fixture ``kubernetes``: a cluster with one node for the tests of a module.

Without its requirements the test is skipped, or fails if ``HVDTRAIN_TEST_REQUIRE`` contains
``kubernetes``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.environments import KUBERNETES, folder_of, missing_environment
from tests.harness.required import skip_or_fail
from tests.kubernetes.cluster import KubernetesCluster

_COMMANDS = ("busybox", "containerd", "etcd", "runc", "curl", "openssl")


# Module scope: an idle cluster takes some percent of a core.
@pytest.fixture(scope="module")
def kubernetes() -> Iterator[KubernetesCluster]:
    """A cluster with one node."""
    reason = missing_environment(KUBERNETES)
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    if absent:
        reason = f"{', '.join(absent)} not found; tests/kubernetes/packages.txt has the packages"
    if os.geteuid() != 0:
        reason = "a node needs root"
    if reason:
        skip_or_fail(KUBERNETES, reason)
    with KubernetesCluster(folder_of(KUBERNETES) / "bin") as cluster:
        yield cluster
