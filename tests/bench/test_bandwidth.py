"""Bandwidths as nccl-tests defines them."""

from __future__ import annotations

import pytest

from hvdtrain.bench.bandwidth import algorithm_bandwidth, bus_bandwidth


def test_algorithm_bandwidth_is_bytes_over_time() -> None:
    assert algorithm_bandwidth(10_000_000, 0.5) == 20_000_000


# Factors of the document that the module names: 2 (n - 1) / n.
@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_has_the_factor_of_allreduce(ranks: int, factor: float) -> None:
    assert bus_bandwidth(1000, 0.5, ranks) == factor * 2000
