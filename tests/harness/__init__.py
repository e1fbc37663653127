"""Runs tests on every rank of real MPI jobs; see ``plugin`` for what a test can ask for."""
