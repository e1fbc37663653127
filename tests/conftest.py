"""Tests may run on several MPI ranks: ``tests/harness/plugin.py`` says how."""

pytest_plugins = ("tests.harness.plugin", "pytester")
