"""Which ranks work together on which level; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Hierarchy", "plan_hierarchy"]


class Hierarchy(NamedTuple):
    """The place of one rank among the ranks of its host, and the hosts among each other.

    ``seats`` are the numbers that the ranks of its host had when all ranks were there. A lane is
    made of the ranks with one local rank on all hosts; hosts may have ranks beyond the lanes.
    """

    local_rank: int
    seats: tuple[int, ...]
    hosts: int
    lanes: int


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
        seats=tuple(at_first.index(rank) for rank in local),
        hosts=len(sizes),
        lanes=min(sizes.values()),
    )
