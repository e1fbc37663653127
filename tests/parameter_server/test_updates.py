import json
from collections import Counter

import numpy as np
import pytest

from hvdtrain.parameter_server.updates import StalenessStats


@pytest.mark.parametrize("size", [1, 2, 7, 20, 100, 999])
def test_mean_and_percentiles_of_staleness(size):
    staleness = np.random.default_rng(size).poisson(3, size)
    stats = StalenessStats(staleness=Counter(staleness.tolist()))
    assert stats.updates == size
    assert stats.mean_staleness == pytest.approx(staleness.mean())
    for percent in (0, 1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100):
        expected = np.percentile(staleness, percent, method="inverted_cdf")
        assert stats.percentile_of_staleness(percent) == expected, percent


def test_without_updates_staleness_is_zero():
    assert StalenessStats().mean_staleness == 0
    assert StalenessStats().percentile_of_staleness(95) == 0


@pytest.mark.parametrize(
    "stats",
    [
        StalenessStats(),
        StalenessStats(
            pushed=Counter({0: 4, 3: 2}), taken=4, late=2, staleness=Counter([0, 4, 4, 1])
        ),
    ],
)
def test_json_round_trip(stats):
    assert StalenessStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats
