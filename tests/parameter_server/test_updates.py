"""The gradients of several workers, as NumPy would average them, and delay compensation by itself;
tests of servers have its arithmetic on whole trainings.
"""

import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.gradients import Rows, pack_gradients
from hvdtrain.parameter_server.sharding import Spec, numpy_dtype, shard_variables
from hvdtrain.parameter_server.updates import GradientMean, StalenessStats


def specs(*shapes, dtype="float32"):
    return [Spec(f"v{i}", shape, dtype) for i, shape in enumerate(shapes)]


class Buffer:
    """What a server receives one worker's gradients in, after the other's."""

    def __init__(self, specs):
        self._specs = specs
        (self.shard,) = shard_variables(specs, 1)
        self._flat = np.empty(self.shard.nbytes, np.uint8)

    def parts(self, gradients):
        self._flat.fill(255)
        return pack_gradients(self.shard, self._specs, gradients, self._flat)


def whole(spec, rows):
    found = np.zeros(spec.shape)
    np.add.at(found, rows.indices, rows.values.astype("float64"))
    return found


def gradients_of(worker, variables):
    rng = np.random.default_rng(worker)
    dtype = numpy_dtype(variables[0].dtype)
    dense = [rng.normal(size=spec.shape).astype(dtype) for spec in variables[:2]]
    count = [7, 0, 60][worker]
    values = rng.normal(size=(count, 3)).astype(dtype)
    return [*dense, Rows(rng.integers(0, 20, count), values), None]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-6), ("float64", 1e-12), ("float16", 2e-3), ("bfloat16", 2e-2)],
)
def test_weighted_mean(dtype, tolerance):
    """Of dense gradients, and of rows that come from some workers or several times."""
    variables = specs((4, 5), (), (20, 3), (2,), dtype=dtype)
    weights = [1.0, 0.25, 48.0]
    every = [gradients_of(worker, variables) for worker in range(3)]

    def check(found, each):
        expected = np.average(each, axis=0, weights=weights)
        np.testing.assert_allclose(found.astype("float64"), expected, tolerance, tolerance)

    gathering, buffer = GradientMean(), Buffer(variables)
    for order in ([2, 0, 1], [0, 1, 2]):
        for worker in order:
            gathering.add(buffer.parts(gradients_of(worker, variables)), weights[worker])
        mean = gathering.take()
        for number, found in enumerate(mean.by_piece()[:2]):
            assert found.dtype == numpy_dtype(dtype)
            check(found, [gradients[number].astype("float64") for gradients in every])
        (rows,) = mean.rows.values()
        assert rows.values.dtype == numpy_dtype(dtype)
        check(whole(variables[2], rows), [whole(variables[2], g[2]) for g in every])
        assert mean.header[1 + 2] == len(rows.indices)
        assert mean.missing == {3}
        mean.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_wider_than_gradients(dtype):
    """Weights are numbers of samples: a sum may be more than float16 holds, or bfloat16 counts."""
    variables = specs((2,), (4, 1), dtype=dtype)
    kind = numpy_dtype(dtype)
    gathering, buffer = GradientMean(), Buffer(variables)
    values = np.array([2048.0, 1.0], kind)
    rows = Rows(np.array([1, 3]), values.reshape(2, 1))
    for _ in range(600):
        gathering.add(buffer.parts([values, rows]), 128.0)
    mean = gathering.take()
    for found in (mean.by_piece()[0], mean.rows[1].values.reshape(-1)):
        np.testing.assert_array_equal(found, values)


def test_one_worker():
    variables = specs((4, 5), (), (20, 3), (2,))
    gathering, buffer = GradientMean(), Buffer(variables)
    expected = gradients_of(0, variables)
    gathering.add(buffer.parts(expected), 16.0)
    mean = gathering.take()
    for found, gradient in zip(mean.by_piece()[:2], expected):
        np.testing.assert_array_equal(found, gradient)
    found = whole(variables[2], mean.rows[2])
    np.testing.assert_allclose(found, whole(variables[2], expected[2]), 1e-6, 1e-6)


def test_nothing():
    gathering = GradientMean()
    assert gathering.take() is None
    gathering.add(Buffer(specs((2,))).parts([np.ones(2, "float32")]), 1.0)
    assert gathering.take() is not None
    assert gathering.take() is None


def test_different_variables_change_nothing():
    """Who sends them is told so, and what others have sent is as it was."""
    variables = specs((2,), (3, 2))
    gathering, buffer = GradientMean(), Buffer(variables)
    ones = np.ones(2, "float32")
    rows = Rows(np.array([1]), np.ones((1, 2), "float32"))
    gathering.add(buffer.parts([ones, rows]), 1.0)
    for others in ([None, rows], [ones, None], [ones, np.ones((3, 2), "float32")]):
        with pytest.raises(MismatchError, match="Workers have gradients for different variables"):
            gathering.add(buffer.parts(others), 5.0)
    gathering.add(buffer.parts([3 * ones, rows]), 1.0)
    mean = gathering.take()
    np.testing.assert_array_equal(mean.by_piece()[0], [2.0, 2.0])
    np.testing.assert_array_equal(mean.rows[1].indices, [1])
    np.testing.assert_array_equal(mean.rows[1].values, [[1.0, 1.0]])


def test_memory_does_not_grow_with_workers():
    """Neither with the rows that they send: there are never more than the variable has."""
    variables = specs((50_000,), (1000, 50))
    gathering, buffer = GradientMean(), Buffer(variables)
    dense = np.ones(50_000, "float32")
    rows = Rows(np.arange(1000), np.ones((1000, 50), "float32"))
    held = []
    tracemalloc.start()
    try:
        for _ in range(20):
            gathering.add(buffer.parts([dense, rows]), 1.0)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < held[0] + 100_000, held
    assert held[-1] < 2 * buffer.shard.nbytes


def counted(staleness):
    return StalenessStats(staleness=Counter(int(value) for value in staleness))


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
    said = counts.to_json()
    counts.pushed[0] += 1
    counts.late += 1
    assert StalenessStats.from_json(said) == back, "it stays as it was"
    assert (
        StalenessStats.from_json(json.loads(json.dumps(StalenessStats().to_json())))
        == StalenessStats()
    )
