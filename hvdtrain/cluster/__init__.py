"""Hosts, placement, roles and topology: pure functions and frozen values, no TensorFlow, no MPI."""
