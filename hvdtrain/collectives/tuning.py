"""Choice of hierarchy and message sizes, based on the hosts and the speed of their links."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.collectives.fusion import aligned

__all__ = [
    "CHUNK_BYTES",
    "MESSAGE_S",
    "MOST_SMALL_BYTES",
    "Hierarchy",
    "Link",
    "choose_bucket_bytes",
    "choose_chunk_bytes",
    "choose_one_shot_bytes",
    "choose_segment_bytes",
    "choose_turns",
    "fit_chunk_bytes",
    "measure_link",
    "most_small_bytes",
    "plan_hierarchy",
]

# A chunk of this size stays in a core's own cache from one stage to the next.
CHUNK_BYTES = 2 << 20
MOST_CHUNK_BYTES = 16 << 20
LEAST_CHUNK_BYTES = 64 << 10
# Below this size, the cost of a message hardly depends on its size.
LEAST_MESSAGE_BYTES = 64 << 10

# Small segments interleave on a link and don't overflow its queue. But Python needs some
# microseconds for each segment, and the link must not become idle meanwhile.
LEAST_SEGMENT_BYTES = 32 << 10
MOST_SEGMENT_BYTES = 1 << 20
# All other ranks may send to the same rank at the same time. With this many ranks, segments of the
# usual minimum size would overflow the queue.
MANY_RANKS = 12
LEAST_SEGMENT_BYTES_OF_MANY = 8 << 10
SEGMENT_S = 250e-6

# Fixed cost of an allreduce, in addition to three times the latency of the link.
CALL_S = 500e-6
# CPU time of a message between hosts, measured on an Intel Xeon.
MESSAGE_S = 60e-6
# Sending a bucket should take this many times as long as the fixed cost and as the CPU time of its
# messages.
TIMES_CALL = 8
TIMES_MESSAGES = 2
LEAST_BUCKET_BYTES = 256 << 10
MOST_BUCKET_BYTES = 64 << 20
# If ranks compute on GPUs, reductions overlap with that even on one host. Copies to and from the
# GPUs need buckets of some megabytes for full speed.
GPU_BUCKET_BYTES = 8 << 20

# With more ranks, a message to every other rank takes longer than the few rounds of a tree.
MOST_RANKS = 16
# Largest part in one message. Larger parts are faster in segments that overlap with their
# reduction.
MOST_SMALL_BYTES = 32 << 10

# Sizes of the messages that measure a link. The first message opens the connection, so its time
# does not count.
TRIAL_BYTES = (8, 8, 8, 8, 8, 64 << 10, 1 << 20)
TAG = 4


class Hierarchy(NamedTuple):
    """The place of a rank on its host, and the number of hosts."""

    local_rank: int  # index of the rank among the remaining ranks of its host
    window_ranks: tuple[int, ...]  # initial local ranks of the host's remaining ranks
    hosts: int  # number of hosts
    # Number of cross groups. A cross group consists of the ranks with a certain local rank, one on
    # every host. A host may have more ranks than there are cross groups.
    cross_groups: int


class Link(NamedTuple):
    """The slowest link between neighbouring ranks, measured in both directions at once."""

    latency_s: float  # time in seconds of a message of a few bytes
    bytes_per_s: float  # throughput of long messages


def plan_hierarchy(members: Sequence[int], host_of: Sequence[int], member: int) -> Hierarchy:
    """Return the place of the initial rank ``member`` on its host.

    ``members`` are the remaining ranks. ``host_of`` contains the host of each initial rank.
    """
    initial = [rank for rank, host in enumerate(host_of) if host == host_of[member]]
    remaining = [rank for rank in members if host_of[rank] == host_of[member]]
    sizes = Counter(host_of[rank] for rank in members)
    return Hierarchy(
        local_rank=remaining.index(member),
        window_ranks=tuple(initial.index(rank) for rank in remaining),
        hosts=len(sizes),
        cross_groups=min(sizes.values()),
    )


def choose_chunk_bytes(hosts: int, most_bytes: int = MOST_CHUNK_BYTES) -> int:
    """Choose a chunk size so that each host's part of a chunk is not too small."""
    chunk_bytes = CHUNK_BYTES
    target = min(hosts * LEAST_MESSAGE_BYTES, MOST_CHUNK_BYTES)
    while chunk_bytes < target and 2 * chunk_bytes <= most_bytes:
        chunk_bytes *= 2
    return chunk_bytes


def fit_chunk_bytes(wanted_bytes: int, most_bytes: int) -> int:
    """Halve the chunk size until it fits the memory, down to ``LEAST_CHUNK_BYTES``."""
    chunk_bytes = wanted_bytes
    while chunk_bytes > most_bytes and chunk_bytes // 2 >= LEAST_CHUNK_BYTES:
        chunk_bytes = aligned(chunk_bytes // 2)
    return chunk_bytes


def choose_turns(hosts: int, cross_groups: int, chunk_bytes: int) -> int:
    """Choose the number of sets of cross groups. The sets take turns to send chunks.

    With one set, each group exchanges its share of every chunk. If there are many hosts, these
    shares are small messages, which are slow. With several sets, each set exchanges only some of
    the chunks, but larger shares of them.
    """
    return max(1, min(cross_groups, hosts * cross_groups * LEAST_MESSAGE_BYTES // chunk_bytes))


def choose_segment_bytes(bytes_per_s: float, ranks: int) -> int:
    """Choose the message size for a link with this throughput. It is a power of two."""
    target = min(bytes_per_s * SEGMENT_S, MOST_SEGMENT_BYTES)
    segment_bytes = LEAST_SEGMENT_BYTES if ranks < MANY_RANKS else LEAST_SEGMENT_BYTES_OF_MANY
    while segment_bytes * 2 <= target:
        segment_bytes *= 2
    return segment_bytes


def choose_bucket_bytes(link: Link, parties: int, chunk_bytes: int) -> int:
    """Choose the bucket size for gradients that become available one by one.

    With small buckets, reductions start earlier and leave less to do at the end. But each allreduce
    has a fixed cost, and sends two messages per chunk to every other party. A party is a host or,
    without shared memory, a rank.
    """
    bytes_per_s = link.bytes_per_s / 2
    target = TIMES_CALL * bytes_per_s * (CALL_S + 3 * link.latency_s)
    # A bucket smaller than a chunk needs as many messages as a whole chunk.
    for_messages = TIMES_MESSAGES * bytes_per_s * 2 * (parties - 1) * MESSAGE_S
    target = max(target, min(target + for_messages, chunk_bytes))
    return int(min(max(target, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES))


def most_small_bytes(ranks: int) -> int:
    """Return the maximum size of an array for ``SmallAllreduce``; 0 if there are too many ranks."""
    return MOST_SMALL_BYTES * ranks if ranks <= MOST_RANKS else 0


def choose_one_shot_bytes(ranks: int, link: Link) -> int:
    """Return the size of the largest array for which one round is faster than two.

    With n ranks and an array of s bytes, each rank sends ``(n - 1) s`` bytes if there is one round,
    but only ``2 (n - 1) s / n`` bytes in total if there are two rounds.
    """
    more = (ranks - 1) * (1 - 2 / ranks)
    saved_bytes = link.latency_s * link.bytes_per_s
    return MOST_SMALL_BYTES if saved_bytes >= MOST_SMALL_BYTES * more else int(saved_bytes / more)


def measure_link(mpi: ModuleType, comm: Any) -> Link:
    """Measure the slowest link between neighbours, with the same result on all ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    elapsed_s = np.empty(len(TRIAL_BYTES))
    for trial, nbytes in enumerate(TRIAL_BYTES):
        data, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        comm.Barrier()
        start_s = time.perf_counter()
        requests = [
            comm.Irecv([received, mpi.BYTE], before, TAG),
            comm.Isend([data, mpi.BYTE], after, TAG),
        ]
        mpi.Request.Waitall(requests)
        elapsed_s[trial] = time.perf_counter() - start_s
    comm.Allreduce(mpi.IN_PLACE, elapsed_s, mpi.MAX)
    short_s = [s for s, nbytes in zip(elapsed_s[1:], TRIAL_BYTES[1:]) if nbytes == TRIAL_BYTES[0]]
    return Link(float(min(short_s)), float(TRIAL_BYTES[-1] / elapsed_s[-1]))
