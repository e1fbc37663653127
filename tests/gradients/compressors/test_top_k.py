"""Which values are sent, and by whom."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives.single import single_collectives
from hvdtrain.gradients.compressors.top_k import TopK


def test_the_largest_of_each_array_are_sent():
    arrays = [np.array(v, np.float32) for v in ([[1, -5, 2], [4, 0, -3]], [0.5, 0.25], 7.0)]
    sent = TopK(0.5, (0,)).average(single_collectives(), arrays, [], weight=1.0, name="test")
    for mean, expected in zip(sent.means, ([[0, -5, 0], [4, 0, -3]], [0.5, 0], 7.0)):
        np.testing.assert_array_equal(mean, expected)
    for rest, expected in zip(sent.unsent, ([[1, 0, 2], [0, 0, 0]], [0, 0.25], 0.0)):
        np.testing.assert_array_equal(rest, expected)


@pytest.mark.parametrize(("share", "count"), [(1e-9, 1), (0.01, 10), (0.0101, 11), (1.0, 1000)])
def test_how_many(share, count):
    values = np.random.default_rng(5).normal(size=1000).astype("float32")
    sent = TopK(share, (0,)).average(single_collectives(), [values], [], weight=1.0, name="test")
    assert np.count_nonzero(sent.means[0]) == count
