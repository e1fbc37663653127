"""Latency and bandwidth between neighbouring ranks, for choosing how bytes are sent."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["MESSAGE_S", "Link", "choose_bucket_bytes", "choose_segment_bytes", "measure_link"]

# Small messages of all ranks mix on a link, and what waits in front of it overflows no queue; but
# each costs some microseconds of Python, during which the link should not run dry.
LEAST_SEGMENT_BYTES = 32 << 10
MOST_SEGMENT_BYTES = 1 << 20
# Of many ranks all but one may send to that one at a time, more than a queue before a link holds.
MANY_RANKS = 12
LEAST_SEGMENT_BYTES_OF_MANY = 8 << 10
SEGMENT_S = 250e-6

# What an allreduce takes of itself, beside three times a link's latency.
CALL_S = 500e-6
# What a message between hosts takes of a core, as benchmarks/scaling.py measures it.
MESSAGE_S = 60e-6
# So many times that should a bucket be on its way.
TIMES_CALL = 8
# And so many times what its messages take, which are sent while others are on their way.
TIMES_MESSAGES = 2
LEAST_BUCKET_BYTES = 256 << 10
MOST_BUCKET_BYTES = 64 << 20

# The first opens the connections.
TRIAL_BYTES = (8, 8, 8, 8, 8, 64 << 10, 1 << 20)
TAG = 4


class Link(NamedTuple):
    """The slowest link between neighbours, while a rank receives as much as it sends.

    Attributes:
        latency_s: How long a message of some bytes takes.
        bytes_per_s: How fast long messages go.
    """

    latency_s: float
    bytes_per_s: float


def choose_segment_bytes(bytes_per_s: float, ranks: int) -> int:
    """Choose how much each of ``ranks`` sends at a time on a link of this speed: a power of two."""
    wanted = bytes_per_s * SEGMENT_S
    segment_bytes = LEAST_SEGMENT_BYTES if ranks < MANY_RANKS else LEAST_SEGMENT_BYTES_OF_MANY
    while segment_bytes * 2 <= min(wanted, MOST_SEGMENT_BYTES):
        segment_bytes *= 2
    return segment_bytes


def choose_bucket_bytes(link: Link, parties: int, chunk_bytes: int) -> int:
    """Choose how many bytes to combine at a time of what comes bit by bit, as gradients do.

    The less it is the sooner it begins, and the less is left when the last has come; but each
    allreduce costs something of itself, and for each chunk two messages to all other parties.

    Args:
        link: What is between the parties. Nearly everything crosses it twice.
        parties: How many there are.
        chunk_bytes: How much they combine at a time, with a message to each, of what is larger.
    """
    bytes_per_s = link.bytes_per_s / 2
    wanted = TIMES_CALL * bytes_per_s * (CALL_S + 3 * link.latency_s)
    # What is less than a chunk takes as many messages as one.
    for_messages = TIMES_MESSAGES * bytes_per_s * 2 * (parties - 1) * MESSAGE_S
    wanted = max(wanted, min(wanted + for_messages, chunk_bytes))
    return int(min(max(wanted, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES))


def measure_link(mpi: ModuleType, comm: Any) -> Link:
    """Exchange some messages with the neighbours; collective, and the same on all ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    taken_s = np.empty(len(TRIAL_BYTES))
    for trial, nbytes in enumerate(TRIAL_BYTES):
        data, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        comm.Barrier()
        begun_s = time.perf_counter()
        requests = [
            comm.Irecv([received, mpi.BYTE], before, TAG),
            comm.Isend([data, mpi.BYTE], after, TAG),
        ]
        mpi.Request.Waitall(requests)
        taken_s[trial] = time.perf_counter() - begun_s
    comm.Allreduce(mpi.IN_PLACE, taken_s, mpi.MAX)
    short_s = [s for s, nbytes in zip(taken_s[1:], TRIAL_BYTES[1:]) if nbytes == TRIAL_BYTES[0]]
    return Link(float(min(short_s)), float(TRIAL_BYTES[-1] / taken_s[-1]))
