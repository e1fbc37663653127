import ml_dtypes
import numpy as np
import pytest

from hvdtrain.collectives.fusion import ALIGNMENT_BYTES
from hvdtrain.errors import ConfigurationError, ModelError
from hvdtrain.parameter_server.sharding import Shard, Spec, assemble, shard_variables

DTYPES = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"]


def specs(*shapes, dtype="float32"):
    return [Spec(f"v{i}", tuple(shape), dtype) for i, shape in enumerate(shapes)]


def payload(shard: Shard) -> int:
    return sum(piece.nbytes for piece in shard.pieces)


def random_arrays(variables, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(-100, 100, v.shape).astype(getattr(ml_dtypes, v.dtype, v.dtype))
        for v in variables
    ]


def check(variables, shards):
    """Check that each element is in one shard, and that packing and assembling work."""
    owners = [np.zeros(spec.size, int) for spec in variables]
    for shard in shards:
        assert shard.pieces
        end = 0
        for piece in shard.pieces:
            owners[piece.variable][piece.start : piece.stop] += 1
            assert piece.stop > piece.start
            assert piece.offset % ALIGNMENT_BYTES == 0
            assert piece.offset >= end
            end = piece.offset + piece.nbytes
        assert end <= shard.nbytes < end + ALIGNMENT_BYTES
        views = shard.views(np.zeros(shard.nbytes, np.uint8))
        assert [v.shape for v in views] == [piece.shape for piece in shard.pieces]
        assert [v.dtype.name for v in views] == [piece.dtype for piece in shard.pieces]
    assert all((owner == 1).all() for owner in owners)

    arrays = random_arrays(variables)
    buffers = [np.full(shard.nbytes, 255, np.uint8) for shard in shards]
    for shard, buffer in zip(shards, buffers):
        shard.pack(arrays, buffer)
    back = assemble(variables, shards, buffers)
    for array, copy in zip(arrays, back):
        np.testing.assert_array_equal(array.astype("float64"), copy.astype("float64"))


def check_balance(shards):
    loads = [payload(shard) for shard in shards]
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


MODELS = {
    "a convolutional network": specs((5, 5, 1, 32), (32,), (5, 5, 32, 64), (64,), (3136, 512),
                                     (512,), (512, 10), (10,)),
    "one huge embedding": specs((100_000, 16), (16, 1), ()),
    "many tiny ones": specs(*[(3,), (), (2, 2)] * 700),
    "one variable": specs((1000,)),
    "one row": specs((1, 4000)),
    "empty ones between others": specs((0, 4), (300,), (5, 0), (77, 9), (0,)),
    "mixed types": [Spec(str(i), (40 + i, 7), DTYPES[i % 5]) for i in range(20)],
}  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_shards_are_complete_and_balanced(name, servers):
    shards = shard_variables(MODELS[name], servers)
    assert len(shards) == servers
    check(MODELS[name], shards)
    check_balance(shards)


@pytest.mark.parametrize("seed", range(40))
def test_random_models(seed):
    rng = np.random.default_rng(seed)
    variables = []
    for number in range(int(rng.integers(1, 30))):
        shape = tuple(int(n) for n in rng.integers(0, 30, rng.integers(0, 4)))
        variables.append(Spec(str(number), shape, DTYPES[rng.integers(5)]))
    variables.append(Spec("enough", (997,), "float32"))
    servers = int(rng.integers(1, 9))
    shards = shard_variables(variables, servers)
    check(variables, shards)
    check_balance(shards)
    whole = {int(i) for i in rng.integers(0, len(variables), 5)}
    shards = shard_variables(variables, min(servers, 3), whole)
    check(variables, shards)
    for shard in shards:
        for piece in shard.pieces:
            assert piece.variable not in whole or piece.shape == variables[piece.variable].shape


def test_a_server_has_neighbouring_layers():
    places = [
        (piece.variable, piece.start)
        for shard in shard_variables(MODELS["a convolutional network"], 3)
        for piece in shard.pieces
    ]
    assert places == sorted(places)


def test_variables_are_cut_between_small_rows():
    embedding, narrow = specs((1000, 16), (3, 4000))
    for shard in shard_variables([embedding], 7):
        (piece,) = shard.pieces
        assert piece.shape == ((piece.stop - piece.start) // 16, 16)
    pieces = [shard.pieces[0] for shard in shard_variables([narrow], 2)]
    assert [piece.shape for piece in pieces] == [(6000,), (6000,)]


def test_rows_up_to_a_fiftieth_of_a_shard_are_not_cut():
    def rows(count):
        return [
            piece.shape
            for shard in shard_variables(specs((count, 99)), 2)
            for piece in shard.pieces
        ]

    assert rows(101) == [(50, 99), (51, 99)]
    assert [len(shape) for shape in rows(99)] == [1, 1]


def test_views_share_memory_with_the_buffer():
    (shard,) = shard_variables(specs((2, 3), ()), 1)
    buffer = np.zeros(shard.nbytes, np.uint8)
    matrix, scalar = shard.views(buffer)
    matrix[1, 2] = 5
    scalar[...] = 7
    assert buffer[20:24].view(np.float32) == 5
    assert buffer[64:68].view(np.float32) == 7


def test_unsplittable_variables_go_to_the_smallest_shard_and_others_balance():
    variables = specs((300,), (500,), (400,), (600,))
    shards = shard_variables(variables, 2, whole=range(4))
    assert [[p.variable for p in shard.pieces] for shard in shards] == [[0, 3], [1, 2]]
    shards = shard_variables(variables, 2, whole=[3])
    check(variables, shards)
    assert [payload(shard) // 4 for shard in shards] == [900, 900]
    # One server has more than its share: the others are balanced.
    shards = shard_variables(specs((600,), (150,), (50,)), 3, whole=[0])
    assert [payload(shard) // 4 for shard in shards] == [600, 100, 100]


def test_too_many_servers_are_an_error():
    variables = specs((2,), (3, 0), (), (2, 2))
    check(variables, shard_variables(variables, 7))
    with pytest.raises(ConfigurationError, match=r"between 1 and 7, got 8"):
        shard_variables(variables, 8)
    check(variables, shard_variables(variables, 4, whole=[3]))
    check(variables, shard_variables(variables, 3, whole=[0, 1, 2, 3]))
    with pytest.raises(ConfigurationError, match=r"3 elements that can be divided and 1 variables"):
        shard_variables(variables, 5, whole=[3, 1])
    with pytest.raises(ConfigurationError, match="between 1 and 7, got 0"):
        shard_variables(variables, 0)
    with pytest.raises(ModelError, match="need trainable variables with elements"):
        shard_variables(specs((0,)), 1)


@pytest.mark.parametrize("servers", range(1, 10))
def test_every_server_gets_an_element_if_there_are_enough(servers):
    """The test has one element of eight bytes and eight elements of one byte."""
    variables = [Spec("large", (1,), "float64"), Spec("small", (8,), "float8_e4m3fn")]
    for order in (variables, variables[::-1]):
        check(order, shard_variables(order, servers))
