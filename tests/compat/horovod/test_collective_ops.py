"""Values, gradients and errors of Horovod's collectives on tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.compat.horovod.collective_ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdtrain.compat.horovod.compression import Compression
from hvdtrain.compat.horovod.reduction_arguments import Average, Max, Min, Product, Sum
from hvdtrain.errors import ConfigurationError, MismatchError
from tests.collectives.engines import DTYPES, expected, values

OPS = [Average, Sum, Min, Max, Product]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
SHAPES = [(), (5,), (3, 4), (2, 3, 2)]
several = pytest.mark.ranks(1, 3)
pair = pytest.mark.ranks(2)


def expected_reduction(op: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if op is Average and dtype.kind in "iu":
        total = expected("sum", job.size(), shape, values, dtype)
        return (total / job.size()).astype(dtype)
    return expected(op.tensor_op, job.size(), shape, values, dtype)


def is_unsupported(op: Any, dtype: np.dtype) -> bool:
    return dtype.kind == "b" and op in (Sum, Average)


@pytest.mark.essential
@several
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_allreduce_of_every_type(world, op, in_mode):
    # In one function, as tracing takes longest.
    kinds = [
        (dtype, shape) for dtype in DTYPES if not is_unsupported(op, dtype) for shape in SHAPES
    ]
    tensors = [tf.constant(values(job.rank(), shape, dtype)) for dtype, shape in kinds]
    results = in_mode(lambda *tensors: [allreduce(x, op=op) for x in tensors])(*tensors)
    for (dtype, shape), tensor, result in zip(kinds, tensors, results):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(result.numpy(), expected_reduction(op, shape, dtype))


@several
def test_grouped_allreduce_of_mixed_types(world, in_mode):
    kinds = [(dtype, shape) for dtype in DTYPES if dtype.kind != "b" for shape in SHAPES]
    tensors = [tf.constant(values(job.rank(), shape, dtype)) for dtype, shape in kinds]
    results = in_mode(lambda *tensors: grouped_allreduce(tensors, op=Sum))(*tensors)
    for (dtype, shape), result in zip(kinds, results):
        np.testing.assert_array_equal(result.numpy(), expected_reduction(Sum, shape, dtype))
    assert grouped_allreduce([]) == []


@several
@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_prescale_and_postscale(world, dtype, in_mode):
    tensor = tf.constant(values(job.rank(), (4,), np.dtype(tf.as_dtype(dtype).as_numpy_dtype)))
    call = in_mode(lambda x: allreduce(x, op=Sum, prescale_factor=4, postscale_factor=0.5))
    total = sum(values(rank, (4,), np.dtype("int64")) for rank in range(job.size()))
    np.testing.assert_array_equal(tf.cast(call(tensor), tf.int64), 2 * total)


@pair
def test_op_and_deprecated_average(world):
    one = tf.ones(3) * (job.rank() + 1.0)
    np.testing.assert_array_equal(allreduce(one, average=False), [3.0] * 3)
    np.testing.assert_array_equal(allreduce(one, average=True), [1.5] * 3)
    np.testing.assert_array_equal(allreduce(one), [1.5] * 3)
    np.testing.assert_array_equal(allreduce(one, op=1), [3.0] * 3)
    with pytest.raises(ValueError, match=r"got op=.*Sum.* and average=True"):
        allreduce(one, average=True, op=Sum)
    with pytest.raises(ValueError, match="op must be one of Average, Sum"):
        allreduce(one, op=9)
    with pytest.raises(NotImplementedError, match="must be Sum or Average, got Max"):
        reducescatter(one, op=Max)


@several
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression(world, compression, in_mode):
    """Only floating types are converted."""
    sent_as = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[compression]
    chosen = getattr(Compression, compression)
    tensor = tf.constant([1.0 + 2.0**-9, 3.0]) * (job.rank() + 1)
    result = in_mode(lambda x: allreduce(x, compression=chosen, op=Sum))(tensor)
    tensors = [tf.constant([1.0 + 2.0**-9, 3.0]) * (rank + 1) for rank in range(job.size())]
    rounded = tf.add_n([tf.cast(tf.cast(entry, sent_as), tf.float32) for entry in tensors])
    np.testing.assert_array_equal(result, tf.cast(tf.cast(rounded, sent_as), tf.float32))
    assert result.dtype == tf.float32
    whole = tf.constant([2**20 + 1])
    assert allreduce(whole, compression=chosen, op=Max).numpy() == [2**20 + 1]


@pytest.mark.ranks(1)
def test_autograph_converts_only_user_code(world):
    frames: list[str] = []

    class RecordsFrames(Compression.none):
        @classmethod
        def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
            frames.extend(frame.name for frame in traceback.extract_stack())
            return super().compress(tensor)

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        return allreduce(tensor, compression=RecordsFrames)

    step(tf.ones(3))
    assert [name for name in frames if name.startswith("tf__")] == ["tf__step"]


@several
@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_allreduce_of_indexed_slices(world, op, in_mode):
    """Rows with the same index are added."""

    def combine(rows: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(
            allreduce(tf.IndexedSlices(rows, indices, tf.constant([6, 2])), op=op)
        )

    rank, size = job.rank(), job.size()
    slices = tf.ones([rank + 1, 2]) * (rank + 1.0), tf.range(rank + 1)
    result = in_mode(combine)(*slices)
    total = np.zeros((6, 2))
    for other in range(size):
        total[: other + 1] += other + 1
    np.testing.assert_allclose(result, total / (size if op is Average else 1), rtol=1e-6)


@pair
def test_unsupported_options_of_indexed_slices(world):
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(NotImplementedError, match="got op=Min"):
        allreduce(rows, op=Min)
    with pytest.raises(NotImplementedError, match="don't support prescale_factor"):
        allreduce(rows, prescale_factor=2.0)


@several
def test_allgather_of_every_type(world, in_mode):
    """Ranks may have different numbers of rows, or none."""
    kinds = [(dtype, rest) for dtype in DTYPES for rest in [(), (3,), (2, 2)]]
    tensors = [tf.constant(values(job.rank(), (job.rank(), *rest), dtype)) for dtype, rest in kinds]
    results = in_mode(lambda *tensors: list(map(allgather, tensors)))(*tensors)
    for (dtype, rest), tensor, result in zip(kinds, tensors, results):
        arrays = [values(rank, (rank, *rest), dtype) for rank in range(job.size())]
        assert result.dtype == tensor.dtype
        np.testing.assert_array_equal(result.numpy(), np.concatenate(arrays))


@several
def test_grouped_allgather_and_reducescatter(world, in_mode):
    tensors = [tf.range(job.rank() + 1), tf.ones([job.size(), 2])]
    first, second = in_mode(lambda *tensors: grouped_allgather(tensors))(*tensors)
    np.testing.assert_array_equal(
        first, np.concatenate([np.arange(rank + 1) for rank in range(job.size())])
    )
    assert second.shape == (job.size() ** 2, 2)
    parts = in_mode(lambda x: grouped_reducescatter([x, 2.0 * x], op=Sum))(tensors[1])
    np.testing.assert_array_equal(parts[0], [[job.size()] * 2])
    np.testing.assert_array_equal(parts[1], [[2 * job.size()] * 2])


@several
def test_broadcast_of_every_type(world, in_mode):
    root = job.size() - 1
    kinds = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    tensors = [tf.constant(values(job.rank(), shape, dtype)) for dtype, shape in kinds]
    results = in_mode(lambda *tensors: [broadcast(x, root) for x in tensors])(*tensors)
    for (dtype, shape), tensor, result in zip(kinds, tensors, results):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(result.numpy(), values(root, shape, dtype))


@several
def test_broadcast_in_place(world):
    variables = [tf.Variable([job.rank() + 1.0]), tf.Variable([[job.rank()]])]
    returned = broadcast_(variables, job.size() - 1, name="state")
    for first, second in (variables, returned):
        assert float(first[0]) == job.size()
        assert int(second[0, 0]) == job.size() - 1


@several
def test_alltoall_of_every_type(world, in_mode):
    rank, size = job.rank(), job.size()
    for dtype in DTYPES:
        # Rank r sends r + s + 1 rows to rank s.
        splits = [rank + other + 1 for other in range(size)]
        sent = values(rank, (sum(splits), 2), dtype)
        rows, received = in_mode(alltoall)(tf.constant(sent), tf.constant(splits))
        np.testing.assert_array_equal(received, [other + rank + 1 for other in range(size)])
        parts = []
        for other in range(size):
            sends = [other + to + 1 for to in range(size)]
            start = sum(sends[:rank])
            array = values(other, (sum(sends), 2), dtype)
            parts.append(array[start : start + sends[rank]])
        np.testing.assert_array_equal(rows.numpy(), np.concatenate(parts))
    even = in_mode(alltoall)(tf.range(size) + 10 * rank)
    np.testing.assert_array_equal(even, [10 * other + rank for other in range(size)])


@several
@pytest.mark.parametrize("op", [Sum, Average], ids=lambda op: op.name)
def test_reducescatter_of_every_type(world, op, in_mode):
    """The first ranks get one more row if the rows do not divide evenly."""
    rank, size = job.rank(), job.size()
    shapes = [(size, 2), (2 * size + 1, 2)]
    kinds = [
        (dtype, shape) for dtype in DTYPES if not is_unsupported(op, dtype) for shape in shapes
    ]
    tensors = [tf.constant(values(rank, shape, dtype)) for dtype, shape in kinds]
    results = in_mode(lambda *tensors: [reducescatter(x, op=op) for x in tensors])(*tensors)
    for (dtype, shape), tensor, result in zip(kinds, tensors, results):
        shares = np.array_split(expected_reduction(op, shape, dtype), size)
        assert result.dtype == tensor.dtype
        np.testing.assert_array_equal(result.numpy(), shares[rank])


# Operations, and the factor by which Horovod scales the gradient of the sum of all losses.
GRADIENTS: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[], float]]] = {
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
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_equal_finite_differences(world, case, in_mode):
    """Compare with finite differences: one rank changes one value."""
    operation, factor = GRADIENTS[case]
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

    def total_loss(array: np.ndarray) -> float:
        loss = loss_of(tf.constant(array)).numpy()
        return float(job.collectives().allreduce(np.asarray(loss)))

    result = in_mode(gradient)(tf.constant(value))
    for changed_rank in range(job.size()):
        for index in [(0, 0), (2, 1), (5, 0)]:
            delta = np.zeros(shape)
            delta[index] = step if job.rank() == changed_rank else 0
            slope = (total_loss(value + delta) - total_loss(value - delta)) / (2 * step)
            if job.rank() == changed_rank:
                np.testing.assert_allclose(result[index], factor() * slope, rtol=1e-5, atol=1e-5)


@several
def test_gradients_of_min_and_product_on_equal_values(world):
    x = tf.Variable([2.0, 0.0])
    with tf.GradientTape(persistent=True) as tape:
        least, product = allreduce(x, op=Min), allreduce(x, op=Product)
    np.testing.assert_allclose(tape.gradient(least, x), [1.0, 1.0], rtol=1e-6)
    size = job.size()
    np.testing.assert_allclose(
        tape.gradient(product, x), [size * 2.0 ** (size - 1), 1.0 if size == 1 else 0.0]
    )


@pair
def test_gradients_in_every_floating_type(world, in_mode):
    operations = (allreduce, allgather, lambda x: broadcast(x, 1), alltoall, reducescatter)

    def gradients(*tensors: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tensors)
            losses = [tf.reduce_sum(of(x)) for x in tensors for of in operations]
        inputs = [x for x in tensors for _ in operations]
        return [tape.gradient(loss, x) for loss, x in zip(losses, inputs)]

    result = in_mode(gradients)(*(tf.ones([4, 3], dtype) for dtype in FLOATS))
    expected = [(tf.as_dtype(dtype), (4, 3)) for dtype in FLOATS for _ in operations]
    assert [(gradient.dtype, gradient.shape) for gradient in result] == expected


MISMATCHES = {
    "shape": lambda: allreduce(tf.ones(3 + job.rank()), name="loss"),
    "type": lambda: allreduce(tf.ones(3, [tf.float32, tf.int32][job.rank()]), name="loss"),
    "op": lambda: allreduce(tf.ones(3), op=[Sum, Max][job.rank()], name="loss"),
    "name": lambda: allreduce(tf.ones(3), name=["loss", "other"][job.rank()]),
    "columns": lambda: allgather(tf.ones([1, 3 + job.rank()]), name="loss"),
    "root": lambda: broadcast(tf.ones(3), job.rank(), name="loss"),
    "operation": lambda: [allreduce, allgather][job.rank()](tf.ones(3), name="loss"),
}


@pair
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatches_are_errors_on_every_rank(world, case, in_mode):
    error = MismatchError if in_mode is not tf.function else tf.errors.UnknownError
    with pytest.raises(error, match="Ranks made different") as caught:
        in_mode(MISMATCHES[case])()
    assert "loss" in str(caught.value)
    np.testing.assert_array_equal(allreduce(tf.ones(3), op=Sum), [2.0] * 3)


@pair
def test_wrong_splits_are_an_error_before_rows_are_sent(world):
    with pytest.raises(ConfigurationError, match="splits"):
        alltoall(tf.ones([4]), [1, 1])
    np.testing.assert_array_equal(allreduce(tf.ones(2)), [1.0, 1.0])


@pytest.mark.ranks(2)
def test_ranks_may_have_created_different_numbers_of_layers(world):
    """Automatic names of TensorFlow and Keras then differ between ranks."""
    for _ in range(1 + job.rank()):
        layer = keras.layers.Dense(1, kernel_initializer="ones")

    @tf.function
    def step(x):
        with tf.name_scope(layer.name):
            first = layer(x)
            return grouped_allreduce([tf.square(first), tf.square(x)], op=Sum)

    result, _ = step(tf.ones([1, 2]))
    for _ in range(1 - job.rank()):
        keras.layers.Dense(1)  # so that later tests see equal names
    assert float(result[0, 0]) == 8.0
