"""Hosts, placement, roles and topology, as pure functions and frozen values."""
