import tracemalloc

import numpy as np
import pytest

from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.gradients import (
    CHECKED_ITEMS,
    GradientMean,
    Rows,
    ShardGradients,
    pack_gradients,
)
from hvdtrain.parameter_server.sharding import Spec, numpy_dtype, shard_variables

SHAPES = [(7, 6), (6,), (90, 2), (), (3, 200), (2, 3, 4), (50,)]
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def specs(*shapes, dtype="float32"):
    return [Spec(f"v{i}", shape, dtype) for i, shape in enumerate(shapes)]


def integers(rng, shape, dtype):
    """Return values that are added without rounding."""
    return np.asarray(rng.integers(-4, 5, shape)).astype(numpy_dtype(dtype))


def random_rows(rng, spec, count):
    values = integers(rng, (count, *spec.shape[1:]), spec.dtype)
    return Rows(rng.integers(0, spec.shape[0], count), values)


def packed(shard, specs, gradients):
    flat = np.full(shard.nbytes, 255, np.uint8)
    return pack_gradients(shard, specs, gradients, flat)


def received(gradients):
    """Send gradients to a different buffer, which only knows their header."""
    flat = np.full(gradients.shard.nbytes, 255, np.uint8)
    copy = ShardGradients.from_header(gradients.shard, gradients.header.copy(), flat)
    for source, target in zip(gradients.blocks(), copy.blocks(), strict=True):
        assert (source.dtype, source.shape) == (target.dtype, target.shape)
        assert target.flags.c_contiguous
        target[...] = source
    copy.check()
    return copy


def dense(shape, gradient):
    """Return a gradient as a float64 array, or None."""
    if not isinstance(gradient, Rows):
        return None if gradient is None else gradient.astype("float64")
    whole = np.zeros(shape)
    np.add.at(whole, gradient.indices, gradient.values.astype("float64"))
    return whole


def assembled(specs, parts):
    """Return the gradients of all variables from those on all servers."""
    whole = [None] * len(specs)
    for part in parts:
        for piece, gradient in zip(part.shard.pieces, part.by_piece()):
            if gradient is None:
                continue
            if whole[piece.variable] is None:
                whole[piece.variable] = np.full(specs[piece.variable].shape, np.nan)
            flat = whole[piece.variable].reshape(-1)
            assert np.isnan(flat[piece.start : piece.stop]).all()
            flat[piece.start : piece.stop] = dense(piece.shape, gradient).reshape(-1)
    return whole


def check(specs, gradients, servers):
    """Send gradients to servers, check that they are equal there, and return them."""
    shards = shard_variables(specs, servers)
    parts = [received(packed(shard, specs, gradients)) for shard in shards]
    for got, spec, gradient in zip(assembled(specs, parts), specs, gradients):
        np.testing.assert_array_equal(got, dense(spec.shape, gradient))
    return parts


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_mixture_of_gradients_is_received_unchanged(dtype, servers):
    variables = specs(*SHAPES, dtype=dtype)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        gradients = []
        for spec in variables:
            kind = rng.choice(["dense", "sparse", "none"]) if spec.shape else "dense"
            count = rng.choice([0, 1, 5, 300])
            whole = None if kind == "none" else integers(rng, spec.shape, dtype)
            gradients.append(random_rows(rng, spec, count) if kind == "sparse" else whole)
        check(variables, gradients, servers)
    (parts,) = check(variables, [None] * len(SHAPES), 1)
    assert list(parts.blocks()) == []
    assert parts.missing == set(range(len(SHAPES)))


def test_rows_are_sent_to_their_owners():
    """Each server counts rows from its own first row."""
    variables = specs((90, 2))
    indices = np.array([89, 0, 45, 0, 44, 89])
    values = np.arange(12, dtype="float32").reshape(6, 2)
    first, second = check(variables, [Rows(indices, values)], 2)
    assert first.header.tolist() == [-1, 3]
    np.testing.assert_array_equal(first.rows[0].indices, [0, 0, 44])
    np.testing.assert_array_equal(first.rows[0].values, values[[1, 3, 4]])
    np.testing.assert_array_equal(second.rows[0].indices, [44, 0, 44])
    np.testing.assert_array_equal(second.rows[0].values, values[[0, 2, 5]])


def test_a_server_without_any_of_the_rows_gets_an_empty_sparse_gradient():
    variables = specs((90, 2))
    _, second = check(variables, [Rows(np.array([3]), np.ones((1, 2), "float32"))], 2)
    assert second.header.tolist() == [-1, 0]
    assert second.missing == set()
    assert second.rows[0].values.shape == (0, 2)
    assert list(second.blocks()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sparse_gradient_of_a_variable_that_is_cut_within_rows_is_sent_dense(dtype):
    variables = specs((3, 200), dtype=dtype)
    rng = np.random.default_rng(1)
    parts = check(variables, [random_rows(rng, variables[0], 5)], 2)
    assert parts[0].shard.pieces[0].shape == (300,)
    assert [dict(part.rows) for part in parts] == [{}, {}]


def test_neighbouring_dense_gradients_are_sent_in_one_block():
    variables = specs(*SHAPES)
    rng = np.random.default_rng(1)
    gradients = [integers(rng, spec.shape, spec.dtype) for spec in variables]
    (parts,) = check(variables, gradients, 1)
    assert [block.nbytes for block in parts.blocks()] == [
        parts.shard.pieces[-1].offset + parts.shard.pieces[-1].nbytes
    ]
    gradients[2] = None
    (parts,) = check(variables, gradients, 1)
    assert parts.missing == {2}
    assert len(list(parts.blocks())) == 2
    gradients[2] = random_rows(rng, variables[2], 4)
    (parts,) = check(variables, gradients, 1)
    assert len(list(parts.blocks())) == 4


@pytest.mark.parametrize("kinds", [[-3, -2], [-2, -7], [-2, 1]])
def test_a_header_of_another_model_is_an_error(kinds):
    """The header contains rows of a scalar, which has none."""
    (shard,) = shard_variables(specs((4, 2), ()), 1)
    with pytest.raises(MismatchError, match=r"Received gradients of kinds \[.*\] for 2 pieces"):
        ShardGradients.from_header(shard, np.array([-1, *kinds]), np.empty(shard.nbytes, np.uint8))


@pytest.mark.parametrize("indices", [[-1, 2], [0, 4], [1 << 40]])
def test_rows_out_of_range_are_an_error(indices):
    (shard,) = shard_variables(specs((4, 2)), 1)
    rows = Rows(np.array(indices), np.zeros((len(indices), 2), "float32"))
    gradients = ShardGradients(shard=shard, flat=np.empty(shard.nbytes, np.uint8), rows={0: rows})
    message = f"rows {min(indices)} to {max(indices)} of a piece with 4"
    with pytest.raises(MismatchError, match=message):
        gradients.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_found_anywhere(dtype, value):
    variables = specs((2 * CHECKED_ITEMS + 5,), (3, 2), (4, 2), dtype=dtype)
    (shard,) = shard_variables(variables, 1)
    good = np.ones(variables[0].shape, numpy_dtype(dtype))
    sparse = Rows(np.arange(2), np.ones((2, 2), numpy_dtype(dtype)))
    assert packed(shard, variables, [good, sparse, None]).non_finite() == []
    for place in (0, CHECKED_ITEMS - 1, CHECKED_ITEMS, good.size - 1):
        bad = good.copy()
        bad[place] = value
        assert packed(shard, variables, [bad, sparse, None]).non_finite() == [0]
    sparse.values[1, 1] = value
    assert packed(shard, variables, [good, sparse, None]).non_finite() == [1]
    assert packed(shard, variables, [bad, sparse, None]).non_finite() == [0, 1]


MIXED = (4, 5), (), (20, 3), (2,)


class Receiver:
    """Packs gradients into the same buffer again and again, as a server receives them."""

    def __init__(self, specs):
        self._specs = specs
        (self.shard,) = shard_variables(specs, 1)
        self._flat = np.empty(self.shard.nbytes, np.uint8)

    def receive(self, gradients):
        self._flat.fill(255)
        return pack_gradients(self.shard, self._specs, gradients, self._flat)


def random_gradients(worker, dtype="float32"):
    rng = np.random.default_rng(worker)
    kind = numpy_dtype(dtype)
    count = [7, 0, 60][worker]
    rows = Rows(rng.integers(0, 20, count), rng.normal(size=(count, 3)).astype(kind))
    return [*(np.asarray(rng.normal(size=shape)).astype(kind) for shape in MIXED[:2]), rows, None]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-6), ("float64", 1e-12), ("float16", 2e-3), ("bfloat16", 2e-2)],
)
def test_the_mean_is_weighted(dtype, tolerance):
    mean, receiver = GradientMean(), Receiver(specs(*MIXED, dtype=dtype))
    weights = [1.0, 0.25, 48.0]
    every = [random_gradients(worker, dtype) for worker in range(3)]
    for order in ([2, 0, 1], [0, 1, 2]):
        for worker in order:
            gradients = receiver.receive(random_gradients(worker, dtype))
            mean.add(gradients, weights[worker])
        result = mean.take()
        for shape, got, *of_workers in zip(MIXED[:3], result.by_piece(), *every):
            assert (got.values if isinstance(got, Rows) else got).dtype == numpy_dtype(dtype)
            each = [dense(shape, gradient) for gradient in of_workers]
            expected = np.average(each, axis=0, weights=weights)
            np.testing.assert_allclose(dense(shape, got), expected, tolerance, tolerance)
        assert result.header[1 + 2] == len(result.rows[2].indices)
        assert result.missing == {3}
        result.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    """Weights are numbers of samples, so sums can exceed the range or precision of half types."""
    kind = numpy_dtype(dtype)
    mean, receiver = GradientMean(), Receiver(specs((2,), (4, 1), dtype=dtype))
    values = np.array([2048.0, 1.0], kind)
    rows = Rows(np.array([1, 3]), values.reshape(2, 1))
    for _ in range(600):
        mean.add(receiver.receive([values, rows]), 128.0)
    result = mean.take()
    for got in (result.by_piece()[0], result.rows[1].values.reshape(-1)):
        np.testing.assert_array_equal(got, values)


def test_gradients_of_different_variables_are_refused_and_change_nothing():
    mean, receiver = GradientMean(), Receiver(specs((2,), (3, 2)))
    ones = np.ones(2, "float32")
    rows = Rows(np.array([1]), np.ones((1, 2), "float32"))
    mean.add(receiver.receive([ones, rows]), 1.0)
    for others in ([None, rows], [ones, None], [ones, np.ones((3, 2), "float32")]):
        with pytest.raises(MismatchError, match="Workers have gradients for different variables"):
            mean.add(receiver.receive(others), 5.0)
    mean.add(receiver.receive([3 * ones, rows]), 1.0)
    result = mean.take()
    np.testing.assert_array_equal(result.by_piece()[0], [2.0, 2.0])
    np.testing.assert_array_equal(result.rows[1].indices, [1])
    np.testing.assert_array_equal(result.rows[1].values, [[1.0, 1.0]])


def test_the_memory_of_the_mean_does_not_grow_with_workers():
    receiver = Receiver(specs((50_000,), (1000, 50)))
    mean = GradientMean()
    whole = np.ones(50_000, "float32")
    rows = Rows(np.arange(1000), np.ones((1000, 50), "float32"))
    held = []
    tracemalloc.start()
    try:
        for _ in range(20):
            mean.add(receiver.receive([whole, rows]), 1.0)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < held[0] + 100_000, held
    assert held[-1] < 2 * receiver.shard.nbytes
