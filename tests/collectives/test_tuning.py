"""The hierarchy of ranks, and the sizes of messages for different links and numbers of hosts."""

from __future__ import annotations

import pytest

from hvdtrain.collectives.tuning import (
    Hierarchy,
    Link,
    choose_bucket_bytes,
    choose_chunk_bytes,
    choose_one_shot_bytes,
    choose_segment_bytes,
    choose_turns,
    fit_chunk_bytes,
    most_small_bytes,
    plan_hierarchy,
)

KIB, MIB = 1 << 10, 1 << 20
SLOW = Link(latency_s=100e-6, bytes_per_s=25e6)
FAST = Link(latency_s=10e-6, bytes_per_s=12.5e9)
FAR = Link(latency_s=20e-3, bytes_per_s=125e6)
CHUNK = 2 * MIB


@pytest.mark.parametrize(
    ("members", "host_of", "member", "expected"),
    [
        pytest.param([0, 1, 2], [0, 0, 0], 1, (1, (0, 1, 2), 1, 3), id="one-host"),
        pytest.param([0, 2], [0, 0, 0], 2, (1, (0, 2), 1, 2), id="lost-rank"),
        pytest.param([1, 2], [0, 0, 0], 1, (0, (1, 2), 1, 2), id="lost-first-rank"),
        pytest.param([0, 1, 2, 3], [0, 0, 2, 2], 3, (1, (0, 1), 2, 2), id="two-hosts"),
        pytest.param([0, 2, 3], [0, 0, 2, 2], 3, (1, (0, 1), 2, 1), id="fewer-groups"),
        pytest.param([0, 1, 3], [0, 1, 0, 1], 3, (1, (0, 1), 2, 1), id="alternating"),
        pytest.param([2, 3], [0, 0, 2, 2], 3, (1, (0, 1), 1, 2), id="lost-host"),
        pytest.param([3], [0, 0, 2, 2], 3, (0, (1,), 1, 1), id="single"),
    ],
)
def test_hierarchy(members, host_of, member: int, expected) -> None:
    assert plan_hierarchy(members, host_of, member) == Hierarchy(*expected)


@pytest.mark.parametrize(
    ("hosts", "most_bytes", "expected"),
    [
        pytest.param(1, 1 << 40, 2 * MIB, id="one-host"),
        pytest.param(32, 1 << 40, 2 * MIB, id="parts-of-64-KiB"),
        pytest.param(33, 1 << 40, 4 * MIB, id="one-more"),
        pytest.param(10_000, 1 << 40, 16 * MIB, id="maximum"),
        pytest.param(10_000, 15 * MIB, 8 * MIB, id="limited-memory"),
        pytest.param(10_000, 0, 2 * MIB, id="no-memory"),
    ],
)
def test_chunks_grow_with_the_number_of_hosts(hosts: int, most_bytes: int, expected: int) -> None:
    assert choose_chunk_bytes(hosts, most_bytes) == expected


@pytest.mark.parametrize(
    ("wanted_bytes", "most_bytes", "expected"),
    [
        pytest.param(2 * MIB, 2 * MIB, 2 * MIB, id="fits"),
        pytest.param(2 * MIB, 2 * MIB - 1, MIB, id="half"),
        pytest.param(2 * MIB, 300 * KIB, 256 * KIB, id="eighth"),
        pytest.param(2 * MIB, 0, 64 * KIB, id="minimum"),
        pytest.param(3 * KIB, 0, 3 * KIB, id="below-the-minimum"),
        pytest.param(192 * 1001, 100_000, 96_128, id="whole-cache-lines"),
    ],
)
def test_chunks_fit_into_memory(wanted_bytes: int, most_bytes: int, expected: int) -> None:
    assert fit_chunk_bytes(wanted_bytes, most_bytes) == expected


@pytest.mark.parametrize(
    ("hosts", "cross_groups", "expected"),
    [
        pytest.param(1, 8, 1, id="one-host"),
        pytest.param(4, 8, 1, id="parts-of-64-KiB"),
        pytest.param(7, 8, 1, id="almost-half"),
        pytest.param(8, 8, 2, id="parts-of-32-KiB"),
        pytest.param(64, 8, 8, id="one-group-per-chunk"),
        pytest.param(1000, 8, 8, id="at-most-all-groups"),
        pytest.param(64, 1, 1, id="one-rank-per-host"),
    ],
)
def test_cross_groups_take_turns_with_many_hosts(
    hosts: int, cross_groups: int, expected: int
) -> None:
    assert choose_turns(hosts, cross_groups, CHUNK) == expected


@pytest.mark.parametrize(
    ("bytes_per_s", "ranks", "expected"),
    [
        (SLOW.bytes_per_s, 4, 32 * KIB),
        (500e6, 4, 64 * KIB),  # a power of two
        (FAST.bytes_per_s, 4, MIB),
        (SLOW.bytes_per_s, 16, 8 * KIB),
        (FAST.bytes_per_s, 16, MIB),
    ],
)
def test_segment_bytes(bytes_per_s: float, ranks: int, expected: int) -> None:
    assert choose_segment_bytes(bytes_per_s, ranks) == expected


def test_buckets_take_longer_than_the_fixed_cost_of_a_call() -> None:
    assert choose_bucket_bytes(SLOW, 2, CHUNK) == 256 * KIB
    # 8 times half a millisecond and three times the latency, sent twice.
    assert choose_bucket_bytes(FAST, 2, CHUNK) == pytest.approx(8 * 530e-6 * 12.5e9 / 2, rel=1e-6)
    assert choose_bucket_bytes(FAR, 2, CHUNK) == pytest.approx(8 * 60.5e-3 * 125e6 / 2, rel=1e-6)


def test_buckets_below_a_chunk_grow_with_the_number_of_messages() -> None:
    # 126 messages take 7.56 ms, and the fixed cost is 0.8 ms.
    expected = (8 * 0.8e-3 + 2 * 7.56e-3) * 25e6 / 2
    assert choose_bucket_bytes(SLOW, 64, CHUNK) == pytest.approx(expected, rel=1e-6)
    assert choose_bucket_bytes(SLOW, 1024, CHUNK) == CHUNK
    assert choose_bucket_bytes(FAST, 1024, CHUNK) == choose_bucket_bytes(FAST, 2, CHUNK)


def test_one_round_if_latency_matters_more_than_bytes() -> None:
    # With two ranks, one and two rounds send equally much.
    assert choose_one_shot_bytes(2, SLOW) == 32 * KIB
    # The saved round is worth 2500 bytes, for n - 1 - 2 (n - 1) / n more arrays.
    assert choose_one_shot_bytes(4, SLOW) == int(2500 / 1.5)
    assert choose_one_shot_bytes(16, SLOW) == int(2500 / (15 - 15 / 8))
    assert choose_one_shot_bytes(16, FAR) == 32 * KIB


def test_too_many_ranks_send_no_small_arrays() -> None:
    assert most_small_bytes(16) == 16 * 32 * KIB
    assert most_small_bytes(17) == 0
