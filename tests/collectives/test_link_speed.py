"""What follows from the speed of a link."""

from __future__ import annotations

import pytest

from hvdtrain.collectives.link_speed import Link, choose_bucket_bytes, choose_segment_bytes
from hvdtrain.collectives.small_allreduce import choose_one_shot_bytes, most_small_bytes

SLOW = Link(latency_s=100e-6, bytes_per_s=25e6)
FAST = Link(latency_s=10e-6, bytes_per_s=12.5e9)
FAR = Link(latency_s=20e-3, bytes_per_s=125e6)
CHUNK = 2 << 20


@pytest.mark.parametrize(("link", "expected"), [(SLOW, 32 << 10), (FAST, 1 << 20)])
def test_segments_keep_the_link_busy_for_a_moment(link: Link, expected: int) -> None:
    assert choose_segment_bytes(link.bytes_per_s, 4) == expected


def test_segments_are_powers_of_two() -> None:
    assert choose_segment_bytes(500e6, 4) == 64 << 10


def test_many_ranks_send_less_at_a_time_where_the_link_is_slow() -> None:
    assert choose_segment_bytes(SLOW.bytes_per_s, 16) == 8 << 10
    assert choose_segment_bytes(FAST.bytes_per_s, 16) == 1 << 20


def test_buckets_take_longer_than_what_starting_one_costs() -> None:
    assert choose_bucket_bytes(SLOW, 2, CHUNK) == 256 << 10
    # 8 times half a millisecond and three times the latency, sent twice.
    assert choose_bucket_bytes(FAST, 2, CHUNK) == pytest.approx(8 * 530e-6 * 12.5e9 / 2, rel=1e-6)
    assert choose_bucket_bytes(FAR, 2, CHUNK) == pytest.approx(8 * 60.5e-3 * 125e6 / 2, rel=1e-6)


def test_buckets_below_a_chunk_grow_with_the_messages_that_one_takes() -> None:
    # 126 of them take 7.56 ms, and the rest of a call 0.8.
    expected = (8 * 0.8e-3 + 2 * 7.56e-3) * 25e6 / 2
    assert choose_bucket_bytes(SLOW, 64, CHUNK) == pytest.approx(expected, rel=1e-6)
    assert choose_bucket_bytes(SLOW, 1024, CHUNK) == CHUNK
    assert choose_bucket_bytes(FAST, 1024, CHUNK) == choose_bucket_bytes(FAST, 2, CHUNK)


def test_one_round_where_latency_counts_more_than_bytes() -> None:
    # Between two ranks both ways send as much.
    assert choose_one_shot_bytes(2, SLOW) == 32 << 10
    # The round that is saved takes as long as 2500 bytes, and n - 1 - 2 (n - 1) / n arrays more go.
    assert choose_one_shot_bytes(4, SLOW) == int(2500 / 1.5)
    assert choose_one_shot_bytes(16, SLOW) == int(2500 / (15 - 15 / 8))
    assert choose_one_shot_bytes(16, FAR) == 32 << 10


def test_no_array_is_small_among_many() -> None:
    assert most_small_bytes(16) == 16 * (32 << 10)
    assert most_small_bytes(17) == 0
