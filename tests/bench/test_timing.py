"""Timing of alternating operations, and bandwidths as nccl-tests defines them."""

from __future__ import annotations

import pytest

from hvdtrain.bench.timing import bus_bandwidth, time_in_turn
from hvdtrain.collectives.engine import single_engine


def test_operations_alternate_after_a_warm_up() -> None:
    calls: list[str] = []
    timings = time_in_turn(
        single_engine(),
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        repetitions=2,
        calls=2,
    )
    assert "".join(calls) == "aabb" * 3
    assert list(timings) == ["a", "b"]
    for timing in timings.values():
        assert 0 < timing.best_s <= timing.median_s


def test_divided() -> None:
    whole = time_in_turn(single_engine(), {"a": lambda: None}, repetitions=1)["a"]
    part = whole.divided(4)
    assert (part.best_s, part.median_s) == (whole.best_s / 4, whole.median_s / 4)


@pytest.mark.ranks(2)
def test_all_ranks_get_the_same_times(world, rank_count: int) -> None:
    from hvdtrain.world import collectives

    timings = time_in_turn(collectives(), {"nothing": lambda: None}, repetitions=3)
    times = collectives().allgather_object([timings["nothing"].best_s, timings["nothing"].median_s])
    assert len(times) == rank_count
    assert times[0] == times[1]


# 2 (n - 1) / n
@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth(ranks: int, factor: float) -> None:
    assert bus_bandwidth(1000, 0.5, ranks) == factor * 2000
