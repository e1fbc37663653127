"""Tests may run on several MPI ranks, on a cluster of four hosts, and with other MPIs.

``plugin.py`` in ``tests/harness``, ``tests/testbed`` and ``tests/environments`` says how.
"""

pytest_plugins = (
    "tests.checkpoint.disks",
    "tests.environments.plugin",
    "tests.harness.plugin",
    "tests.harness.times",
    "tests.testbed.plugin",
    "pytester",
)
