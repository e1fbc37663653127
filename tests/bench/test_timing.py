"""Operations timed in turn, and bandwidths as nccl-tests defines them."""

from __future__ import annotations

import pytest

from hvdtrain.bench.timing import bus_bandwidth, time_in_turn
from hvdtrain.collectives.engine import single_engine


def test_operations_take_turns_and_the_first_measurement_does_not_count() -> None:
    calls: list[str] = []
    found = time_in_turn(
        single_engine(),
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        repetitions=2,
        calls=2,
    )
    assert "".join(calls) == "aabb" * 3
    assert list(found) == ["a", "b"]
    for timing in found.values():
        assert 0 < timing.best_s <= timing.median_s


def test_a_part_has_its_share() -> None:
    whole = time_in_turn(single_engine(), {"a": lambda: None}, repetitions=1)["a"]
    part = whole.divided(4)
    assert (part.best_s, part.median_s) == (whole.best_s / 4, whole.median_s / 4)


@pytest.mark.ranks(2)
def test_all_ranks_hold_the_same_times(world, rank_count: int) -> None:
    from hvdtrain.world import collectives

    found = time_in_turn(collectives(), {"nothing": lambda: None}, repetitions=3)
    everyone = collectives().allgather_object([found["nothing"].best_s, found["nothing"].median_s])
    assert len(everyone) == rank_count
    assert everyone[0] == everyone[1]


# Factors of the document that the module names: 2 (n - 1) / n.
@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_has_the_factor_of_allreduce(ranks: int, factor: float) -> None:
    assert bus_bandwidth(1000, 0.5, ranks) == factor * 2000
