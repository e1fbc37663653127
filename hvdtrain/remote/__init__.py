"""Probes of other hosts, and the problems and remedies that follow from them."""
