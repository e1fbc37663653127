"""What a test can ask for.

``kubernetes``
    Fixture: a cluster of one node, the same for all tests of a process. Where it can't be had, the
    test is skipped, or fails where ``HVDTRAIN_TEST_REQUIRE`` contains ``kubernetes``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.environments import KUBERNETES, folder_of, missing_environment
from tests.harness.required import do_without
from tests.kubernetes.cluster import KubernetesCluster

_COMMANDS = ("busybox", "containerd", "etcd", "runc", "curl", "openssl")


# Of a module, and not of all: one that idles takes some percent of a core.
@pytest.fixture(scope="module")
def kubernetes() -> Iterator[KubernetesCluster]:
    """A cluster of one node."""
    reason = missing_environment(KUBERNETES)
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    if absent:
        reason = f"{', '.join(absent)} not found; tests/kubernetes/packages.txt has the packages"
    if os.geteuid() != 0:
        reason = "a node needs root"
    if reason:
        do_without(KUBERNETES, reason)
    with KubernetesCluster(folder_of(KUBERNETES) / "bin") as cluster:
        yield cluster
