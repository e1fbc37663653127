"""Collectives as differentiable operations: checked against one process that holds all data."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.errors import MismatchError
from hvdtrain.tensorflow.differentiable_ops import stack_ranks
from tests.collectives.engines import EngineCase, new_engine

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "bool"]
two = pytest.mark.ranks(2)
one_to_three = pytest.mark.ranks(1, 2, 3)
WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])


def _data(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).normal(size=shape)


def _weights(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([100 + rank, *shape]).normal(size=(job.size(), *shape))


def _loss(rank: int, stack: tf.Tensor) -> tf.Tensor:
    """Another function of everybody's values on each rank."""
    weights = tf.constant(_weights(rank, tuple(stack.shape[1:])), stack.dtype)
    return tf.reduce_sum(weights * stack**2) + tf.reduce_sum(stack) ** 2


def _in(mode: bool, function):
    return tf.function(function) if mode else function


@two
@WAYS
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)], ids=str)
def test_values(world, shape: tuple[int, ...], compiled: bool) -> None:
    for dtype in DTYPES:
        if (dtype, shape, compiled) == ("bfloat16", (), False):
            continue  # TensorFlow 2.21 makes no NumPy array of such a tensor
        mine = tf.cast(tf.constant(_data(job.rank(), shape)), dtype)
        result = _in(compiled, lambda x: stack_ranks(job.collectives(), x, "test"))(mine)
        every = [tf.cast(tf.constant(_data(rank, shape)), dtype) for rank in range(job.size())]
        assert (result.dtype, result.shape) == (mine.dtype, (job.size(), *shape))
        np.testing.assert_array_equal(result.numpy(), tf.stack(every).numpy())


@one_to_three
@WAYS
@pytest.mark.parametrize("shape", [(), (2, 5)], ids=str)
def test_gradient_is_that_of_one_process(world, shape: tuple[int, ...], compiled: bool) -> None:
    """The sum of all ranks' losses, as a function of this rank's values."""

    def gradient(value: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = _loss(job.rank(), stack_ranks(job.collectives(), value, "test"))
        return tape.gradient(loss, value)

    mine = tf.constant(_data(job.rank(), shape))
    result = _in(compiled, gradient)(mine)
    assert (result.dtype, result.shape) == (tf.float64, shape)

    every = tf.constant(np.stack([_data(rank, shape) for rank in range(job.size())]))
    with tf.GradientTape() as tape:
        tape.watch(every)
        total = tf.add_n([_loss(rank, every) for rank in range(job.size())])
    reference = tape.gradient(total, every)[job.rank()]
    np.testing.assert_allclose(result, reference, rtol=1e-12, atol=1e-12)


@two
def test_second_use_in_one_function(world) -> None:
    """Each use has a name of its own; the order of the backward pass is the same everywhere."""

    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = stack_ranks(job.collectives(), x, "first")
            second = stack_ranks(job.collectives(), 3.0 * x, "second")
            loss = tf.reduce_sum(first) + tf.reduce_sum(second * second)
        return loss, tape.gradient(loss, x)

    loss, gradient = step(tf.constant([1.0 + job.rank()]))
    every = [1.0 + rank for rank in range(job.size())]
    np.testing.assert_allclose(loss, sum(x + 9 * x * x for x in every))
    np.testing.assert_allclose(gradient, [job.size() * (1 + 18 * every[job.rank()])])


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
from hvdtrain.keras.batch_normalization import synchronize_batch_normalization
from hvdtrain.tensorflow.differentiable_ops import stack_ranks

hvdtrain.init()
first_rank, dies = hvdtrain.rank(), int(sys.argv[1])
collectives = world.collectives()
traces = []

def leave(dying):
    if dying and first_rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)

@tf.function
def step(mine, dying):
    traces.append(1)
    with tf.GradientTape() as tape:
        tape.watch(mine)
        stack = stack_ranks(collectives, mine, "test")
        assert stack.shape.as_list() == [None, 2]
        loss = (first_rank + 1.0) * tf.reduce_sum(stack**3)  # another on each rank
    tf.numpy_function(leave, [dying], [])
    gradient = tape.gradient(loss, mine)
    assert gradient.shape.as_list() == [2]
    return stack, gradient

everyone = [[rank + 2.0, -rank - 1.0] for rank in range(3)]
left = [rank for rank in range(3) if rank != dies]

def check(dying, gave, backward):
    stack, gradient = step(tf.constant(everyone[first_rank]), tf.constant(dying))
    np.testing.assert_array_equal(stack, [everyone[rank] for rank in gave])
    factor = 3.0 * sum(rank + 1.0 for rank in backward)
    np.testing.assert_allclose(gradient, factor * np.square(everyone[first_rank]))

check(False, range(3), range(3))
check(True, range(3), left)
assert hvdtrain.size() == 2
check(False, left, left)
assert len(traces) == 1

# Moments of those that are left; and of none, where all who had rows were lost.
layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
layer.build((None, 3))
rows = []
synchronize_batch_normalization(layer, collectives, lambda: rows[-1])
x = np.random.default_rng(1).normal(size=(3, 5, 3)).astype("float32") + 4.0

@tf.function
def normalise(mine, count):
    rows.append(count)
    with tf.GradientTape() as tape:
        tape.watch(mine)
        loss = tf.reduce_sum(layer(mine, training=True) ** 3)
    return tape.gradient(loss, mine)

there = np.concatenate(x[left])
assert np.isfinite(normalise(x[first_rank], tf.constant(5.0))).all()
np.testing.assert_allclose(layer.moving_mean, 0.5 * there.mean(0), rtol=1e-5)
np.testing.assert_allclose(layer.moving_variance, 0.5 + 0.5 * there.var(0), rtol=1e-4)
before = [variable.numpy() for variable in layer.variables]
assert np.isfinite(normalise(x[first_rank], tf.constant(0.0))).all()
for one, other in zip(layer.variables, before):
    np.testing.assert_allclose(one, other, rtol=1e-6)
print("rank", first_rank, "is now", hvdtrain.rank())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_is_lost_between_the_forward_and_the_backward_pass(elastic, dies: int) -> None:
    done = elastic(SURVIVE, arguments=[str(dies)])
    assert done.returncode == 0, done
    for now, rank in enumerate(rank for rank in range(3) if rank != dies):
        assert f"rank {rank} is now {now}" in done.stdout
