"""Averaging of gradients over all ranks, for every framework."""
