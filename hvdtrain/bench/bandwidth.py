"""Bandwidth of collectives, as nccl-tests defines it.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

__all__ = ["algorithm_bandwidth", "bus_bandwidth"]


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes of one rank's array over the time of the operation, in bytes a second."""
    return nbytes / seconds


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """What the hardware had to carry for an allreduce, in bytes a second.

    Each of the n ranks must send and receive at least 2 (n - 1) / n times its array, whatever the
    algorithm; so this can be held against the speed of the memory or of the network, and
    compared between different numbers of ranks.
    """
    return algorithm_bandwidth(nbytes, seconds) * 2 * (ranks - 1) / ranks
