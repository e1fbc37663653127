"""The two levels on which ranks work together: inside a host, and between hosts; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.collectives.fusion import aligned

__all__ = [
    "CHUNK_BYTES",
    "Hierarchy",
    "choose_chunk_bytes",
    "choose_turns",
    "fit_chunk_bytes",
    "plan_hierarchy",
]

# What stays in a core's own cache from one stage to the next.
CHUNK_BYTES = 2 << 20
MOST_CHUNK_BYTES = 16 << 20
LEAST_CHUNK_BYTES = 64 << 10
# Of what is smaller most of the cost is that there is a message at all.
LEAST_MESSAGE_BYTES = 64 << 10


class Hierarchy(NamedTuple):
    """The place of one rank among the ranks of its host, and the hosts among each other.

    Attributes:
        local_rank: This rank's number on its host now.
        window_ranks: The numbers that the ranks of its host had there when all ranks were left.
        hosts: How many hosts there are.
        cross_groups: How many groups there are that consist of one rank of each host, those with
            the same local rank; a host may have ranks beyond them.
    """

    local_rank: int
    window_ranks: tuple[int, ...]
    hosts: int
    cross_groups: int


def plan_hierarchy(members: Sequence[int], host_of: Sequence[int], me: int) -> Hierarchy:
    """Arrange the ranks that are left.

    Args:
        members: Their first numbers, in order.
        host_of: The host of each rank that there was at first.
        me: The first number of this rank.
    """
    at_first = [rank for rank, host in enumerate(host_of) if host == host_of[me]]
    local = [rank for rank in members if host_of[rank] == host_of[me]]
    sizes = Counter(host_of[rank] for rank in members)
    return Hierarchy(
        local_rank=local.index(me),
        window_ranks=tuple(at_first.index(rank) for rank in local),
        hosts=len(sizes),
        cross_groups=min(sizes.values()),
    )


def choose_chunk_bytes(hosts: int, most_bytes: int = MOST_CHUNK_BYTES) -> int:
    """Choose how much is combined at a time: of many hosts each adds up a part that is not small.

    Args:
        hosts: How many there are.
        most_bytes: For how much there is memory.
    """
    chunk_bytes = CHUNK_BYTES
    wanted = min(hosts * LEAST_MESSAGE_BYTES, MOST_CHUNK_BYTES)
    while chunk_bytes < wanted and 2 * chunk_bytes <= most_bytes:
        chunk_bytes *= 2
    return chunk_bytes


def fit_chunk_bytes(wanted_bytes: int, most_bytes: int) -> int:
    """Return the size of chunks for which there is memory: halved until they fit, or very small."""
    chunk_bytes = wanted_bytes
    while chunk_bytes > most_bytes and chunk_bytes // 2 >= LEAST_CHUNK_BYTES:
        chunk_bytes = aligned(chunk_bytes // 2)
    return chunk_bytes


def choose_turns(hosts: int, cross_groups: int, chunk_bytes: int) -> int:
    """Choose in how many turns cross groups carry chunks.

    In one turn each carries its part of every chunk. Of many hosts these parts of parts would be
    small, and messages many: in several turns each chunk goes with some of the groups, while others
    carry the next ones.

    Args:
        hosts: How many of them a group connects.
        cross_groups: How many groups there are.
        chunk_bytes: The size of a chunk.
    """
    return max(1, min(cross_groups, hosts * cross_groups * LEAST_MESSAGE_BYTES // chunk_bytes))
