"""How stale gradients were, as NumPy would count it."""

import json

import numpy as np
import pytest

from hvdtrain.parameter_server.update_log import StalenessStats


def counted(staleness):
    counts = StalenessStats()
    for value in staleness:
        counts.update(int(value))
    return counts


@pytest.mark.parametrize("size", [1, 2, 7, 20, 100, 999])
def test_mean_and_percentiles(size):
    staleness = np.random.default_rng(size).poisson(3, size)
    counts = counted(staleness)
    assert counts.updates == size
    assert counts.mean_staleness == pytest.approx(staleness.mean())
    for percent in (0, 1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100):
        expected = np.percentile(staleness, percent, method="inverted_cdf")
        assert counts.percentile_of_staleness(percent) == expected, percent


def test_no_updates():
    assert StalenessStats().mean_staleness == 0
    assert StalenessStats().percentile_of_staleness(95) == 0


def test_json():
    counts = counted([0, 4, 4, 1])
    counts.taken, counts.late = 4, 2
    counts.pushed.update({0: 4, 3: 2})
    back = StalenessStats.from_json(json.loads(json.dumps(counts.to_json())))
    assert back == counts
    assert back.staleness == {0: 1, 1: 1, 4: 2}
    assert back.pushed == {0: 4, 3: 2}
    assert (
        StalenessStats.from_json(json.loads(json.dumps(StalenessStats().to_json())))
        == StalenessStats()
    )
