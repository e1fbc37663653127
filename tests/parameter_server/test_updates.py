import json
from collections import Counter

import pytest

from hvdtrain.parameter_server.updates import StalenessStats


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
