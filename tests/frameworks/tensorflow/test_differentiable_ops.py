"""Differentiable collectives compared with one process that holds all data."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.errors import MismatchError
from hvdtrain.frameworks.tensorflow.differentiable_ops import stack_ranks
from tests.collectives.engines import EngineCase, new_engine

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "bool"]
two = pytest.mark.ranks(2)
one_to_three = pytest.mark.ranks(1, 2, 3)


def _data(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).normal(size=shape)


def _weights(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([100 + rank, *shape]).normal(size=(job.size(), *shape))


def _loss(rank: int, stack: tf.Tensor) -> tf.Tensor:
    """Return a loss that differs between ranks."""
    weights = tf.constant(_weights(rank, tuple(stack.shape[1:])), stack.dtype)
    return tf.reduce_sum(weights * stack**2) + tf.reduce_sum(stack) ** 2


@two
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)], ids=str)
def test_values(world, shape: tuple[int, ...], in_mode) -> None:
    for dtype in DTYPES:
        tensor = tf.cast(tf.constant(_data(job.rank(), shape)), dtype)
        result = in_mode(lambda x: stack_ranks(job.collectives(), x, "test"))(tensor)
        expected = [tf.cast(tf.constant(_data(rank, shape)), dtype) for rank in range(job.size())]
        assert (result.dtype, result.shape) == (tensor.dtype, (job.size(), *shape))
        np.testing.assert_array_equal(result.numpy(), tf.stack(expected).numpy())


@one_to_three
@pytest.mark.parametrize("shape", [(), (2, 5)], ids=str)
def test_gradient_equals_one_process(world, shape: tuple[int, ...], in_mode) -> None:
    def gradient(value: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = _loss(job.rank(), stack_ranks(job.collectives(), value, "test"))
        return tape.gradient(loss, value)

    result = in_mode(gradient)(tf.constant(_data(job.rank(), shape)))
    assert (result.dtype, result.shape) == (tf.float64, shape)

    joint = tf.constant(np.stack([_data(rank, shape) for rank in range(job.size())]))
    with tf.GradientTape() as tape:
        tape.watch(joint)
        total = tf.add_n([_loss(rank, joint) for rank in range(job.size())])
    expected = tape.gradient(total, joint)[job.rank()]
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


@two
def test_two_uses_in_one_function(world) -> None:

    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = stack_ranks(job.collectives(), x, "first")
            second = stack_ranks(job.collectives(), 3.0 * x, "second")
            loss = tf.reduce_sum(first) + tf.reduce_sum(second * second)
        return loss, tape.gradient(loss, x)

    loss, gradient = step(tf.constant([1.0 + job.rank()]))
    inputs = [1.0 + rank for rank in range(job.size())]
    np.testing.assert_allclose(loss, sum(x + 9 * x * x for x in inputs))
    np.testing.assert_allclose(gradient, [job.size() * (1 + 18 * inputs[job.rank()])])


@two
def test_different_shapes_are_an_error() -> None:
    engine = new_engine(EngineCase(kind="shared_memory", hosts=(0, 0)))
    with pytest.raises(MismatchError, match=r"allgather\(moments\)"):
        stack_ranks(engine, tf.ones([2 + (engine.rank == 1)]), "moments")


SURVIVE = """
import os, signal, sys
import keras, numpy as np, tensorflow as tf
import hvdtrain
from hvdtrain import world
from hvdtrain.trainer.batch_normalization import synchronize_batch_normalization
from hvdtrain.frameworks.tensorflow.differentiable_ops import stack_ranks

hvdtrain.init()
first_rank, killed_rank = hvdtrain.rank(), int(sys.argv[1])
collectives = world.collectives()
traces = []

def kill(now):
    if now and first_rank == killed_rank:
        os.kill(os.getpid(), signal.SIGKILL)

@tf.function
def step(inputs, kill_now):
    traces.append(1)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        stack = stack_ranks(collectives, inputs, "test")
        assert stack.shape.as_list() == [None, 2]
        loss = (first_rank + 1.0) * tf.reduce_sum(stack**3)
    tf.numpy_function(kill, [kill_now], [])
    gradient = tape.gradient(loss, inputs)
    assert gradient.shape.as_list() == [2]
    return stack, gradient

all_inputs = [[rank + 2.0, -rank - 1.0] for rank in range(3)]
survivors = [rank for rank in range(3) if rank != killed_rank]

def check(kill_now, forward, backward):
    stack, gradient = step(tf.constant(all_inputs[first_rank]), tf.constant(kill_now))
    np.testing.assert_array_equal(stack, [all_inputs[rank] for rank in forward])
    factor = 3.0 * sum(rank + 1.0 for rank in backward)
    np.testing.assert_allclose(gradient, factor * np.square(all_inputs[first_rank]))

check(False, range(3), range(3))
check(True, range(3), survivors)
assert hvdtrain.size() == 2
check(False, survivors, survivors)
assert len(traces) == 1

# Moments over the survivors, and over no rows at all.
layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
layer.build((None, 3))
rows = []
synchronize_batch_normalization(layer, collectives, lambda: rows[-1])
x = np.random.default_rng(1).normal(size=(3, 5, 3)).astype("float32") + 4.0

@tf.function
def normalize(inputs, count):
    rows.append(count)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        loss = tf.reduce_sum(layer(inputs, training=True) ** 3)
    return tape.gradient(loss, inputs)

joint = np.concatenate(x[survivors])
assert np.isfinite(normalize(x[first_rank], tf.constant(5.0))).all()
np.testing.assert_allclose(layer.moving_mean, 0.5 * joint.mean(0), rtol=1e-5)
np.testing.assert_allclose(layer.moving_variance, 0.5 + 0.5 * joint.var(0), rtol=1e-4)
before = [variable.numpy() for variable in layer.variables]
assert np.isfinite(normalize(x[first_rank], tf.constant(0.0))).all()
for variable, value in zip(layer.variables, before):
    np.testing.assert_allclose(variable, value, rtol=1e-6)
print("rank", first_rank, "is now", hvdtrain.rank())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed_rank", [0, 1])
def test_a_rank_is_lost_between_forward_and_backward_pass(elastic, killed_rank: int) -> None:
    done = elastic(SURVIVE, arguments=[str(killed_rank)])
    assert done.returncode == 0, done
    for new_rank, rank in enumerate(rank for rank in range(3) if rank != killed_rank):
        assert f"rank {rank} is now {new_rank}" in done.stdout
