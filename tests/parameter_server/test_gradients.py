"""Gradients on their way to servers, and added up."""

import numpy as np
import pytest

from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.gradients import (
    CHECKED_ITEMS,
    GradientSum,
    Rows,
    ShardGradients,
    pack_gradients,
)
from hvdtrain.parameter_server.sharding import Spec, numpy_dtype, shard_variables

SHAPES = [(7, 6), (6,), (90, 2), (), (3, 200), (2, 3, 4), (50,)]
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def specs(*shapes, dtype="float32"):
    return [Spec(f"v{i}", shape, dtype) for i, shape in enumerate(shapes)]


def numbers(rng, shape, dtype):
    return np.asarray(rng.integers(-4, 5, shape)).astype(numpy_dtype(dtype))


def rows(rng, spec, count):
    """Of a sparse gradient; more than there are come several times."""
    values = numbers(rng, (count, *spec.shape[1:]), spec.dtype)
    return Rows(rng.integers(0, spec.shape[0], count), values)


def packed(shard, specs, gradients):
    flat = np.full(shard.nbytes, 255, np.uint8)
    return pack_gradients(shard, specs, gradients, flat)


def received(parts):
    """What comes out at the other end, which knows the shard, and is told the kinds."""
    flat = np.full(parts.shard.nbytes, 255, np.uint8)
    there = ShardGradients.expect(parts.shard, parts.header.copy(), flat)
    for sent, room in zip(parts.blocks(), there.blocks(), strict=True):
        assert (sent.dtype, sent.shape) == (room.dtype, room.shape)
        assert room.flags.c_contiguous
        room[...] = sent
    there.check()
    return there


def whole(spec, gradient):
    """A dense array, or None, in a type that adds up without rounding."""
    if not isinstance(gradient, Rows):
        return None if gradient is None else gradient.astype("float64")
    found = np.zeros(spec.shape)
    for index, value in zip(gradient.indices, gradient.values):
        found[index] += value.astype("float64")
    return found


def put_together(specs, shards, parts):
    """The gradients of all variables from those that the servers have."""
    found = [None] * len(specs)
    for shard, part in zip(shards, parts):
        for number, (piece, gradient) in enumerate(zip(shard.pieces, part.by_piece())):
            if number in part.missing:
                continue
            if number in part.rows:
                values = whole(Spec("", piece.shape, piece.dtype), part.rows[number])
            else:
                values = gradient.astype("float64")
            if found[piece.variable] is None:
                found[piece.variable] = np.full(specs[piece.variable].shape, np.nan)
            flat = found[piece.variable].reshape(-1)
            assert np.isnan(flat[piece.start : piece.stop]).all()
            flat[piece.start : piece.stop] = values.reshape(-1)
    return found


def check(specs, gradients, servers):
    shards = shard_variables(specs, servers)
    parts = [received(packed(shard, specs, gradients)) for shard in shards]
    for found, spec, gradient in zip(put_together(specs, shards, parts), specs, gradients):
        np.testing.assert_array_equal(found, whole(spec, gradient))
    return parts


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_mixture_arrives(dtype, servers):
    variables = specs(*SHAPES, dtype=dtype)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        gradients = []
        for spec in variables:
            kind = rng.choice(["dense", "sparse", "none"]) if spec.shape else "dense"
            count = rng.choice([0, 1, 5, 300])
            dense = None if kind == "none" else numbers(rng, spec.shape, dtype)
            gradients.append(rows(rng, spec, count) if kind == "sparse" else dense)
        check(variables, gradients, servers)


def test_rows_go_to_their_owners():
    """As rows, each to one server, which counts from its own first."""
    variables = specs((90, 2))
    indices = np.array([89, 0, 45, 0, 44, 89])
    values = np.arange(12, dtype="float32").reshape(6, 2)
    first, second = check(variables, [Rows(indices, values)], 2)
    assert first.header.tolist() == [-1, 3]
    np.testing.assert_array_equal(first.rows[0].indices, [0, 0, 44])
    np.testing.assert_array_equal(first.rows[0].values, values[[1, 3, 4]])
    np.testing.assert_array_equal(second.rows[0].indices, [44, 0, 44])
    np.testing.assert_array_equal(second.rows[0].values, values[[0, 2, 5]])


def test_server_without_any_of_the_rows():
    variables = specs((90, 2))
    _, second = check(variables, [Rows(np.array([3]), np.ones((1, 2), "float32"))], 2)
    assert second.header.tolist() == [-1, 0], "it is sparse there, too"
    assert second.missing == set()
    assert second.rows[0].values.shape == (0, 2)
    assert list(second.blocks()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_gradient_of_a_variable_that_is_cut_within_rows(dtype):
    """No server has these rows: it travels with all its zeros."""
    variables = specs((3, 200), dtype=dtype)
    rng = np.random.default_rng(1)
    parts = check(variables, [rows(rng, variables[0], 5)], 2)
    assert parts[0].shard.pieces[0].shape == (300,)
    assert [dict(part.rows) for part in parts] == [{}, {}]


def test_neighbours_travel_together():
    variables = specs(*SHAPES)
    rng = np.random.default_rng(1)
    gradients = [numbers(rng, spec.shape, spec.dtype) for spec in variables]
    (parts,) = check(variables, gradients, 1)
    assert [block.nbytes for block in parts.blocks()] == [
        parts.shard.pieces[-1].offset + parts.shard.pieces[-1].nbytes
    ]
    gradients[2] = None
    (parts,) = check(variables, gradients, 1)
    assert parts.missing == {2}
    assert len(list(parts.blocks())) == 2
    gradients[2] = rows(rng, variables[2], 4)
    (parts,) = check(variables, gradients, 1)
    assert len(list(parts.blocks())) == 4


def test_nothing_at_all():
    (parts,) = check(specs(*SHAPES), [None] * len(SHAPES), 1)
    assert list(parts.blocks()) == []
    assert parts.missing == set(range(len(SHAPES)))


@pytest.mark.parametrize("kinds", [[-3, -2], [-2, -7], [-2, 1]])
def test_what_no_worker_can_have(kinds):
    """There are no rows of a scalar, and no numbers below those with a meaning."""
    (shard,) = shard_variables(specs((4, 2), ()), 1)
    with pytest.raises(MismatchError, match=r"Gradients of kinds \[.*\] came for 2 pieces"):
        ShardGradients.expect(shard, np.array([-1, *kinds]), np.empty(shard.nbytes, np.uint8))


@pytest.mark.parametrize("indices", [[-1, 2], [0, 4], [1 << 40]])
def test_rows_that_there_are_not(indices):
    (shard,) = shard_variables(specs((4, 2)), 1)
    values = np.zeros((len(indices), 2), "float32")
    parts = ShardGradients(
        shard=shard,
        flat=np.empty(shard.nbytes, np.uint8),
        rows={0: Rows(np.array(indices), values)},
    )
    words = f"rows {min(indices)} to {max(indices)} of a piece with 4"
    with pytest.raises(MismatchError, match=words):
        parts.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_found(dtype, value):
    """Wherever it is among more values than are looked at together."""
    wanted = specs((2 * CHECKED_ITEMS + 5,), (3, 2), (4, 2), dtype=dtype)
    (shard,) = shard_variables(wanted, 1)
    dense = np.ones(wanted[0].shape, numpy_dtype(dtype))
    sparse = Rows(np.arange(2), np.ones((2, 2), numpy_dtype(dtype)))
    assert packed(shard, wanted, [dense, sparse, None]).non_finite() == []
    for place in (0, CHECKED_ITEMS - 1, CHECKED_ITEMS, dense.size - 1):
        bad = dense.copy()
        bad[place] = value
        assert packed(shard, wanted, [bad, sparse, None]).non_finite() == [0]
    sparse.values[1, 1] = value
    assert packed(shard, wanted, [dense, sparse, None]).non_finite() == [1]
    assert packed(shard, wanted, [bad, sparse, None]).non_finite() == [0, 1]


@pytest.mark.parametrize("slot", [2, -2, 1 << 40])
def test_a_slot_that_there_is_not(slot):
    (shard,) = shard_variables(specs((4, 2)), 1)
    flat = np.empty(shard.nbytes, np.uint8)
    with pytest.raises(MismatchError, match=f"in slot {slot} of 2 that this server sees"):
        ShardGradients.expect(shard, np.array([slot, -2]), flat, [flat, flat])


def given_rows(indices, *values):
    return Rows(np.array(indices), np.array(values, "float32"))


def test_sums_of_workers_gradients():
    """Dense gradients, rows, and variables for which some or all workers have no gradient."""
    sums = GradientSum()
    first = np.array([1.0, 2.0], "float32")
    sums.add([first, given_rows([4, 1, 4], [1, 1], [2, 2], [3, 3]), None, None], 1.0)
    first.fill(99)
    sums.add([first, given_rows([0, 1], [5, 5], [6, 6]), np.array(7.0, "float32"), None], 1.0)
    dense, sparse, scalar, none = sums.take()
    assert dense.tolist() == [100.0, 101.0]
    assert sparse.indices.tolist() == [0, 1, 4]
    assert sparse.values.tolist() == [[5, 5], [8, 8], [4, 4]]
    assert scalar.tolist() == 7.0
    assert none is None
    sums.add([None, given_rows([3], [1, 1]), None, None], 1.0)
    assert [gradient is None for gradient in sums.take()] == [True, False, True, True]


@pytest.mark.parametrize("dense_first", [True, False])
def test_sums_of_dense_and_sparse_gradients_are_dense(dense_first):
    sums = GradientSum()
    dense = np.ones((4, 2), "float32")
    gradients = [dense, given_rows([3, 0, 3], [1, 2], [3, 4], [5, 6])]
    for gradient in gradients if dense_first else reversed(gradients):
        sums.add([gradient], 1.0)
    (total,) = sums.take()
    assert total.tolist() == [[4, 5], [1, 1], [1, 1], [7, 9]]
    assert dense.tolist() == [[1, 1]] * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_summed_exactly(dtype):
    """In float32, and travel in the type of the shard."""
    sums = GradientSum()
    kind = numpy_dtype(dtype)
    for value in (4096.0, 2.0, 2.0, -4096.0):
        values = np.full(2, value, kind)
        sums.add([values, Rows(np.array([1]), values.reshape(1, 2))], 1.0)
    dense, sparse = sums.take()
    assert dense.dtype == sparse.values.dtype == np.float32
    assert dense.tolist() == [4.0, 4.0]
    assert sparse.values.tolist() == [[4.0, 4.0]]
    variables = specs((2,), (3, 2), dtype=dtype)
    (shard,) = shard_variables(variables, 1)
    sent = packed(shard, variables, [dense, sparse])
    for parts in (sent, received(sent)):
        flat, rows = parts.by_piece()
        assert flat.dtype == rows.values.dtype == kind
        assert flat.tolist() == [4.0, 4.0]
        assert rows.indices.tolist() == [1]
        assert rows.values.tolist() == [[4.0, 4.0]]
