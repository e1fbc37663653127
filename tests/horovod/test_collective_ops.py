"""Horovod's collectives on tensors: values, gradients, and what ranks do wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.errors import ConfigurationError, MismatchError
from hvdtrain.gradients.compression import Compression
from hvdtrain.horovod.exchange_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
)
from hvdtrain.horovod.op_constants import Average, Max, Min, Product, Sum
from hvdtrain.horovod.reduction_ops import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from tests.collectives.engines import DTYPES, expected, values

OPS = [Average, Sum, Min, Max, Product]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
SHAPES = [(5,), (3, 4), (2, 3, 2)]
several = pytest.mark.ranks(1, 3)
pair = pytest.mark.ranks(2)
WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])


def way(compiled: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function) if compiled else function


def wanted(op: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The average of whole numbers without its fraction."""
    if op is Average and dtype.kind in "iu":
        total = expected("sum", job.size(), shape, values, dtype)
        return (total / job.size()).astype(dtype)
    return expected(op.of_tensors, job.size(), shape, values, dtype)


def refused(op: Any, dtype: np.dtype) -> bool:
    return dtype.kind == "b" and op in (Sum, Average)


@pytest.mark.essential
@several
@WAYS
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_allreduce_of_every_type(world, op, compiled):
    # In one function, as tracing takes longest.
    kinds = [(dtype, shape) for dtype in DTYPES if not refused(op, dtype) for shape in SHAPES]
    every = [tf.constant(values(job.rank(), shape, dtype)) for dtype, shape in kinds]
    results = way(compiled, lambda *tensors: [allreduce(x, op=op) for x in tensors])(*every)
    for (dtype, shape), mine, result in zip(kinds, every, results):
        assert (result.dtype, result.shape) == (mine.dtype, mine.shape)
        np.testing.assert_array_equal(result.numpy(), wanted(op, shape, dtype))


@several
@WAYS
def test_a_group_of_many_types(world, compiled):
    kinds = [(dtype, shape) for dtype in DTYPES if dtype.kind != "b" for shape in SHAPES]
    mine = [tf.constant(values(job.rank(), shape, dtype)) for dtype, shape in kinds]
    results = way(compiled, lambda *tensors: grouped_allreduce(tensors, op=Sum))(*mine)
    for (dtype, shape), result in zip(kinds, results):
        np.testing.assert_array_equal(result.numpy(), wanted(Sum, shape, dtype))
    assert grouped_allreduce([]) == []


@several
@WAYS
@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_factors(world, dtype, compiled):
    mine = tf.constant(values(job.rank(), (4,), np.dtype(tf.as_dtype(dtype).as_numpy_dtype)))
    call = way(compiled, lambda x: allreduce(x, op=Sum, prescale_factor=4, postscale_factor=0.5))
    total = sum(values(rank, (4,), np.dtype("int64")) for rank in range(job.size()))
    np.testing.assert_array_equal(tf.cast(call(mine), tf.int64), 2 * total)


@several
@WAYS
def test_scalars(world, compiled):
    for dtype in ("bfloat16", "float32", "int64"):
        mine = tf.cast(tf.constant(job.rank() + 1), dtype)
        total = way(compiled, lambda x: allreduce(x, op=Sum))(mine)
        assert int(total) == sum(range(1, job.size() + 1))
        assert int(way(compiled, lambda x: broadcast(x, job.size() - 1))(mine)) == job.size()


@pair
def test_older_names_and_what_is_refused(world):
    one = tf.ones(3) * (job.rank() + 1.0)
    np.testing.assert_array_equal(allreduce(one, average=False), [3.0] * 3)
    np.testing.assert_array_equal(allreduce(one, average=True), [1.5] * 3)
    np.testing.assert_array_equal(allreduce(one), [1.5] * 3)
    np.testing.assert_array_equal(allreduce(one, op=1), [3.0] * 3)
    with pytest.raises(ValueError, match=r"Received op=.*Sum.* and average=True"):
        allreduce(one, average=True, op=Sum)
    with pytest.raises(
        ValueError, match="op=9 is no reduction; expected one of Average, Sum, Adasum"
    ):
        allreduce(one, op=9)
    with pytest.raises(NotImplementedError, match="received op=Max"):
        reducescatter(one, op=Max)


@several
@WAYS
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression(world, compression, compiled):
    """It changes the type on the way, and of floating types alone."""
    travels = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[compression]
    chosen = getattr(Compression, compression)
    mine = tf.constant([1.0 + 2.0**-9, 3.0]) * (job.rank() + 1)
    result = way(compiled, lambda x: allreduce(x, compression=chosen, op=Sum))(mine)
    every = [tf.constant([1.0 + 2.0**-9, 3.0]) * (rank + 1) for rank in range(job.size())]
    rounded = tf.add_n([tf.cast(tf.cast(entry, travels), tf.float32) for entry in every])
    np.testing.assert_array_equal(result, tf.cast(tf.cast(rounded, travels), tf.float32))
    assert result.dtype == tf.float32
    whole = tf.constant([2**20 + 1])
    assert allreduce(whole, compression=chosen, op=Max).numpy() == [2**20 + 1]


@pytest.mark.ranks(1)
def test_of_a_function_autograph_translates_what_is_the_users(world):
    frames: list[str] = []

    class Looks(Compression.none):
        @classmethod
        def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
            frames.extend(frame.name for frame in traceback.extract_stack())
            return super().compress(tensor)

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        return allreduce(tensor, compression=Looks)

    step(tf.ones(3))
    assert [name for name in frames if name.startswith("tf__")] == ["tf__step"]


@several
@WAYS
@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_rows(world, op, compiled):
    """They are put one after the other; those that come several times add up."""

    def combine(rows: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(
            allreduce(tf.IndexedSlices(rows, indices, tf.constant([6, 2])), op=op)
        )

    rank, size = job.rank(), job.size()
    mine = tf.ones([rank + 1, 2]) * (rank + 1.0), tf.range(rank + 1)
    result = way(compiled, combine)(*mine)
    total = np.zeros((6, 2))
    for other in range(size):
        total[: other + 1] += other + 1
    np.testing.assert_allclose(result, total / (size if op is Average else 1), rtol=1e-6)


@pair
def test_what_rows_can_not_do(world):
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(NotImplementedError, match="received op=Min"):
        allreduce(rows, op=Min)
    with pytest.raises(NotImplementedError, match="can't be scaled"):
        allreduce(rows, prescale_factor=2.0)


@several
@WAYS
def test_allgather_of_every_type(world, compiled):
    """Ranks may have different numbers of rows, or none."""
    kinds = [(dtype, rest) for dtype in DTYPES for rest in [(), (3,), (2, 2)]]
    tensors = [tf.constant(values(job.rank(), (job.rank(), *rest), dtype)) for dtype, rest in kinds]
    results = way(compiled, lambda *tensors: list(map(allgather, tensors)))(*tensors)
    for (dtype, rest), mine, result in zip(kinds, tensors, results):
        every = [values(rank, (rank, *rest), dtype) for rank in range(job.size())]
        assert result.dtype == mine.dtype
        np.testing.assert_array_equal(result.numpy(), np.concatenate(every))


@several
@WAYS
def test_groups(world, compiled):
    mine = [tf.range(job.rank() + 1), tf.ones([job.size(), 2])]
    first, second = way(compiled, lambda *tensors: grouped_allgather(tensors))(*mine)
    np.testing.assert_array_equal(
        first, np.concatenate([np.arange(rank + 1) for rank in range(job.size())])
    )
    assert second.shape == (job.size() ** 2, 2)
    parts = way(compiled, lambda x: grouped_reducescatter([x, 2.0 * x], op=Sum))(mine[1])
    np.testing.assert_array_equal(parts[0], [[job.size()] * 2])
    np.testing.assert_array_equal(parts[1], [[2 * job.size()] * 2])


@several
@WAYS
def test_broadcast_of_every_type(world, compiled):
    root = job.size() - 1
    kinds = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    every = [tf.constant(values(job.rank(), shape, dtype)) for dtype, shape in kinds]
    results = way(compiled, lambda *tensors: [broadcast(x, root) for x in tensors])(*every)
    for (dtype, shape), mine, result in zip(kinds, every, results):
        assert (result.dtype, result.shape) == (mine.dtype, mine.shape)
        np.testing.assert_array_equal(result.numpy(), values(root, shape, dtype))


@several
def test_broadcast_in_place(world):
    variables = [tf.Variable([job.rank() + 1.0]), tf.Variable([[job.rank()]])]
    returned = broadcast_(variables, job.size() - 1, name="state")
    for found in (variables, returned):
        assert float(found[0][0]) == job.size()
        assert int(found[1][0, 0]) == job.size() - 1


@several
@WAYS
def test_alltoall_of_every_type(world, compiled):
    rank, size = job.rank(), job.size()
    for dtype in DTYPES:
        # Rank r sends r + s + 1 rows to rank s.
        splits = [rank + other + 1 for other in range(size)]
        mine = values(rank, (sum(splits), 2), dtype)
        came, received = way(compiled, alltoall)(tf.constant(mine), tf.constant(splits))
        np.testing.assert_array_equal(received, [other + rank + 1 for other in range(size)])
        parts = []
        for other in range(size):
            sends = [other + to + 1 for to in range(size)]
            start = sum(sends[:rank])
            theirs = values(other, (sum(sends), 2), dtype)
            parts.append(theirs[start : start + sends[rank]])
        np.testing.assert_array_equal(came.numpy(), np.concatenate(parts))
    even = way(compiled, alltoall)(tf.range(size) + 10 * rank)
    np.testing.assert_array_equal(even, [10 * other + rank for other in range(size)])


@several
@WAYS
@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_reducescatter_of_every_type(world, op, compiled):
    """The first ranks have a row more where they don't divide evenly."""
    rank, size = job.rank(), job.size()
    shapes = [(size, 2), (2 * size + 1, 2)]
    kinds = [(dtype, shape) for dtype in DTYPES if not refused(op, dtype) for shape in shapes]
    every = [tf.constant(values(rank, shape, dtype)) for dtype, shape in kinds]
    results = way(compiled, lambda *tensors: [reducescatter(x, op=op) for x in tensors])(*every)
    for (dtype, shape), mine, result in zip(kinds, every, results):
        shares = np.array_split(wanted(op, shape, dtype), size)
        assert result.dtype == mine.dtype
        np.testing.assert_array_equal(result.numpy(), shares[rank])


# Each with the objective whose gradient Horovod gives: what its ranks' losses are added up to.
SLOPES: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[], float]]] = {
    **{
        f"allreduce {op.name}": (
            lambda x, op=op: allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.5),
            lambda: 1.0,
        )
        for op in OPS
    },
    "allgather": (allgather, lambda: 1.0 / job.size()),
    "broadcast": (lambda x: broadcast(x, 0), lambda: 1.0 / job.size()),
    "alltoall": (alltoall, lambda: 1.0),
    "alltoall, splits": (
        lambda x: alltoall(x, [6 - job.size() + 1] + [1] * (job.size() - 1))[0],
        lambda: 1.0,
    ),
    "reducescatter Average": (
        lambda x: reducescatter(x, op=Average, prescale_factor=2.0),
        lambda: float(job.size()),
    ),
    "reducescatter Sum": (
        lambda x: reducescatter(x, op=Sum, postscale_factor=2.0),
        lambda: float(job.size()),
    ),
}


@several
@WAYS
@pytest.mark.parametrize("case", SLOPES)
def test_gradients_are_slopes(world, case, compiled):
    """Against finite differences: one rank moves one value, all see what that does."""
    operation, factor = SLOPES[case]
    shape, step = (6, 2), 1e-6
    value = np.random.default_rng([7, job.rank()]).normal(size=shape)

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        result = operation(x)
        weights = tf.random.stateless_normal(tf.shape(result), [3, job.rank()], dtype=tf.float64)
        return tf.reduce_sum(weights * result**2)

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x)
        return tape.gradient(loss, x)

    def total(mine: np.ndarray) -> float:
        loss = loss_of(tf.constant(mine)).numpy()
        return float(job.collectives().allreduce(np.asarray(loss)))

    found = way(compiled, gradient)(tf.constant(value))
    for mover in range(job.size()):
        for index in [(0, 0), (2, 1), (5, 0)]:
            nudge = np.zeros(shape)
            nudge[index] = step if job.rank() == mover else 0
            slope = (total(value + nudge) - total(value - nudge)) / (2 * step)
            if job.rank() == mover:
                np.testing.assert_allclose(found[index], factor() * slope, rtol=1e-5, atol=1e-5)


@several
def test_gradients_of_ranks_that_are_alike(world):
    """They share what a minimum is worth; a product knows zeros."""
    x = tf.Variable([2.0, 0.0])
    with tf.GradientTape(persistent=True) as tape:
        least, product = allreduce(x, op=Min), allreduce(x, op=Product)
    np.testing.assert_allclose(tape.gradient(least, x), [1.0, 1.0], rtol=1e-6)
    size = job.size()
    np.testing.assert_allclose(
        tape.gradient(product, x), [size * 2.0 ** (size - 1), 1.0 if size == 1 else 0.0]
    )


@pair
@WAYS
def test_gradients_in_every_floating_type(world, compiled):
    operations = (allreduce, allgather, lambda x: broadcast(x, 1), alltoall, reducescatter)

    def gradients(*tensors: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tensors)
            losses = [tf.reduce_sum(of(x)) for x in tensors for of in operations]
        inputs = [x for x in tensors for _ in operations]
        return [tape.gradient(loss, x) for loss, x in zip(losses, inputs)]

    found = way(compiled, gradients)(*(tf.ones([4, 3], dtype) for dtype in FLOATS))
    expected = [(tf.as_dtype(dtype), (4, 3)) for dtype in FLOATS for _ in operations]
    assert [(gradient.dtype, gradient.shape) for gradient in found] == expected


MISTAKES = {
    "shape": lambda: allreduce(tf.ones(3 + job.rank()), name="loss"),
    "type": lambda: allreduce(tf.ones(3, [tf.float32, tf.int32][job.rank()]), name="loss"),
    "op": lambda: allreduce(tf.ones(3), op=[Sum, Max][job.rank()], name="loss"),
    "name": lambda: allreduce(tf.ones(3), name=["loss", "other"][job.rank()]),
    "columns": lambda: allgather(tf.ones([1, 3 + job.rank()]), name="loss"),
    "root": lambda: broadcast(tf.ones(3), job.rank(), name="loss"),
    "operation": lambda: [allreduce, allgather][job.rank()](tf.ones(3), name="loss"),
}


@pair
@WAYS
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_errors_on_every_rank(world, case, compiled):
    with pytest.raises((MismatchError, tf.errors.UnknownError), match="Ranks made different") as e:
        way(compiled, MISTAKES[case])()
    assert "loss" in str(e.value)
    assert compiled or isinstance(e.value, MismatchError)
    np.testing.assert_array_equal(allreduce(tf.ones(3), op=Sum), [2.0] * 3)


@pair
def test_wrong_splits_are_refused_before_anything_is_sent(world):
    with pytest.raises(ConfigurationError, match="splits"):
        alltoall(tf.ones([4]), [1, 1])
    np.testing.assert_array_equal(allreduce(tf.ones(2)), [1.0, 1.0])


@pytest.mark.ranks(2)
def test_ranks_may_have_made_more_of_anything_before(world):
    """Names that TensorFlow and Keras number by themselves differ between such ranks."""
    for _ in range(1 + job.rank()):
        layer = keras.layers.Dense(1, kernel_initializer="ones")

    @tf.function
    def step(x):
        with tf.name_scope(layer.name):
            first = layer(x)
            return grouped_allreduce([tf.square(first), tf.square(x)], op=Sum)

    found, _ = step(tf.ones([1, 2]))
    for _ in range(1 - job.rank()):
        keras.layers.Dense(1)  # other tests compare such names
    assert float(found[0, 0]) == 8.0
