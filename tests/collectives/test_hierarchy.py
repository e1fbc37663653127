"""How ranks are arranged in hosts, and what of their number follows for chunks; pure."""

from __future__ import annotations

import pytest

from hvdtrain.collectives.hierarchy import (
    Hierarchy,
    choose_chunk_bytes,
    choose_turns,
    plan_hierarchy,
)

MIB = 1 << 20


def _place(local_rank: int, window_ranks: tuple[int, ...], hosts: int, groups: int) -> Hierarchy:
    return Hierarchy(
        local_rank=local_rank, window_ranks=window_ranks, hosts=hosts, cross_groups=groups
    )


@pytest.mark.parametrize(
    ("members", "host_of", "me", "expected"),
    [
        pytest.param([0, 1, 2], [0, 0, 0], 1, _place(1, (0, 1, 2), 1, 3), id="one-host"),
        pytest.param([0, 2], [0, 0, 0], 2, _place(1, (0, 2), 1, 2), id="one-is-lost"),
        pytest.param([1, 2], [0, 0, 0], 1, _place(0, (1, 2), 1, 2), id="the-first-is-lost"),
        pytest.param([0, 1, 2, 3], [0, 0, 2, 2], 3, _place(1, (0, 1), 2, 2), id="two-hosts"),
        pytest.param([0, 2, 3], [0, 0, 2, 2], 3, _place(1, (0, 1), 2, 1), id="fewer-groups"),
        pytest.param([0, 1, 3], [0, 1, 0, 1], 3, _place(1, (0, 1), 2, 1), id="mixed"),
        pytest.param([2, 3], [0, 0, 2, 2], 3, _place(1, (0, 1), 1, 2), id="a-host-is-lost"),
        pytest.param([3], [0, 0, 2, 2], 3, _place(0, (1,), 1, 1), id="alone"),
    ],
)
def test_arrangement(members: list[int], host_of: list[int], me: int, expected: Hierarchy) -> None:
    assert plan_hierarchy(members, host_of, me) == expected


@pytest.mark.parametrize(
    ("hosts", "most_bytes", "expected"),
    [
        pytest.param(1, 1 << 40, 2 * MIB, id="one-host"),
        pytest.param(32, 1 << 40, 2 * MIB, id="parts-of-64-KiB"),
        pytest.param(33, 1 << 40, 4 * MIB, id="one-more"),
        pytest.param(10_000, 1 << 40, 16 * MIB, id="never-above-16-MiB"),
        pytest.param(10_000, 15 * MIB, 8 * MIB, id="no-memory-for-more"),
        pytest.param(10_000, 0, 2 * MIB, id="no-memory-known"),
    ],
)
def test_many_hosts_combine_more_at_a_time(hosts: int, most_bytes: int, expected: int) -> None:
    assert choose_chunk_bytes(hosts, most_bytes) == expected


@pytest.mark.parametrize(
    ("hosts", "cross_groups", "expected"),
    [
        pytest.param(1, 8, 1, id="one-host"),
        pytest.param(4, 8, 1, id="parts-of-64-KiB"),
        pytest.param(7, 8, 1, id="not-yet-half"),
        pytest.param(8, 8, 2, id="of-32-KiB"),
        pytest.param(64, 8, 8, id="each-carries-chunks-of-its-own"),
        pytest.param(1000, 8, 8, id="not-more-than-groups"),
        pytest.param(64, 1, 1, id="one-rank-on-each"),
    ],
)
def test_ranks_of_many_hosts_take_turns(hosts: int, cross_groups: int, expected: int) -> None:
    assert choose_turns(hosts, cross_groups, 2 * MIB) == expected
