"""Tests may run on several MPI ranks, and on a cluster of four hosts.

``tests/harness/plugin.py`` and ``tests/testbed/plugin.py`` say how.
"""

pytest_plugins = ("tests.harness.plugin", "tests.testbed.plugin", "pytester")
