"""How fast a rank exchanges bytes with its neighbours, for choosing how much is sent at a time."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["MOST_SEGMENT_BYTES", "choose_segment_bytes", "measure_link"]

# Small messages of all ranks mix on a link, and what waits in front of it overflows no queue; but
# each costs some microseconds of Python, during which the link should not run dry.
LEAST_SEGMENT_BYTES = 32 << 10
MOST_SEGMENT_BYTES = 1 << 20
SEGMENT_S = 250e-6

TRIAL_BYTES = (64 << 10, 1 << 20)
TAG = 4


def choose_segment_bytes(bytes_per_s: float) -> int:
    """How much to send at a time over a link of this speed: a power of two."""
    wanted = bytes_per_s * SEGMENT_S
    segment_bytes = LEAST_SEGMENT_BYTES
    while segment_bytes * 2 <= min(wanted, MOST_SEGMENT_BYTES):
        segment_bytes *= 2
    return segment_bytes


def measure_link(mpi: ModuleType, comm: Any) -> float:
    """Bytes per second that the slowest rank sends to its neighbour while it receives as many.

    The first trial opens the connections; collective, and the same on all ranks.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    taken_s = 0.0
    for nbytes in TRIAL_BYTES:
        data, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        comm.Barrier()
        begun_s = time.perf_counter()
        requests = [
            comm.Irecv([received, mpi.BYTE], before, TAG),
            comm.Isend([data, mpi.BYTE], after, TAG),
        ]
        mpi.Request.Waitall(requests)
        taken_s = comm.allreduce(time.perf_counter() - begun_s, mpi.MAX)
    return TRIAL_BYTES[-1] / taken_s
