"""The two levels on which ranks work together: inside a host, and between hosts; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Hierarchy", "plan_hierarchy"]


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
