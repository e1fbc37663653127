"""Optimizers of tf.compat.v1.train compared with one process that trains on the joint batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.errors import ModelError

v1 = tf.compat.v1
pair = pytest.mark.ranks(2)
ROWS, STEPS = 4, 6
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": v1.train.GradientDescentOptimizer,
    "momentum": lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
    "adam": v1.train.AdamOptimizer,
}


def batches(ranks: range, joined_steps: int = 1) -> list[dict[str, np.ndarray]]:
    """Return the joint batches of ``ranks``, which may also be joined over several steps."""
    result = []
    for first in range(0, STEPS, joined_steps):
        steps = range(first, first + joined_steps)
        rng = [np.random.default_rng([step, rank]) for step in steps for rank in ranks]
        result.append(
            {
                "x": np.concatenate([r.normal(size=(ROWS, 3)).astype(np.float32) for r in rng]),
                "tokens": np.concatenate([r.integers(0, 5, ROWS) for r in rng]),
            }
        )
    return result


def loss_of(x: Any, tokens: Any, *, rows: bool) -> tf.Tensor:
    """Return the loss of a small net. With ``rows``, it also has a gradient of IndexedSlices."""
    w = v1.get_variable("w", initializer=np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    b = v1.get_variable("b", initializer=np.zeros(4, np.float32))
    v1.get_variable("unused", initializer=np.zeros(2, np.float32))
    out = tf.nn.tanh(x @ w + b)
    if rows:
        table = v1.get_variable("table", initializer=np.ones((5, 4), np.float32))
        out += tf.nn.embedding_lookup(table, tokens)
    return tf.reduce_mean(tf.reduce_sum(out**2, axis=1))


def minimize(optimizer: Any, loss: tf.Tensor, global_step: Any) -> Any:
    return optimizer.minimize(loss, global_step=global_step)


def clip_and_apply(optimizer: Any, loss: tf.Tensor, global_step: Any) -> Any:
    """Clip by the norm of the reduced gradients, and keep a moving average of the weights."""
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
    applied = optimizer.apply_gradients(zip(gradients, variables), global_step)
    average = v1.train.ExponentialMovingAverage(0.5, global_step)
    with tf.control_dependencies([applied]):
        return average.apply(v1.trainable_variables())


def train(
    ranks: range,
    make: Callable[[Any], Any],
    wrap: Callable[[Any], Any],
    apply: Callable[..., Any] = minimize,
    *,
    rows: bool = False,
    joined_steps: int = 1,
) -> dict[str, np.ndarray]:
    """Train in a session and return all variables, including slots and moving averages."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 3])
        tokens = v1.placeholder(tf.int64, [None])
        loss = loss_of(x, tokens, rows=rows)
        global_step = v1.train.get_or_create_global_step()
        rate = v1.train.exponential_decay(0.1, global_step, 2, 0.5)
        train_op = apply(wrap(make(rate)), loss, global_step)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for batch in batches(ranks, joined_steps):
                session.run(train_op, {x: batch["x"], tokens: batch["tokens"]})
            variables = v1.global_variables()
            return dict(zip([v.name for v in variables], session.run(variables)))


def plain(optimizer: Any) -> Any:
    return optimizer


def check(
    result: dict[str, np.ndarray], expected: dict[str, np.ndarray], **tolerance: float
) -> None:
    """Compare the variables with the expected ones, and bitwise between ranks."""
    assert result.keys() == expected.keys()
    for name, value in result.items():
        np.testing.assert_allclose(value, expected[name], err_msg=name, **tolerance)
        every = hvd.allgather(np.reshape(value, [1, -1]), name=name).numpy()
        assert (every == every[0]).all(), name


def this_rank() -> range:
    return range(hvd.rank(), hvd.rank() + 1)


@pair
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("apply", [minimize, clip_and_apply])
def test_ranks_train_as_one_process(world, name, apply):
    make = OPTIMIZERS[name]
    result = train(this_rank(), make, hvd.DistributedOptimizer, apply)
    check(result, train(range(2), make, plain, apply), rtol=1e-5, atol=1e-6)
    assert result["global_step:0"] == STEPS


@pair
@pytest.mark.parametrize(
    "options",
    [
        {"sparse_as_dense": True},
        {"sparse_as_dense": False},
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.bf16},
    ],
    ids=str,
)
def test_options(world, options):
    rows = "sparse_as_dense" in options  # momentum skips rows without gradient
    make = OPTIMIZERS["sgd" if rows else "momentum"]
    result = train(this_rank(), make, lambda o: hvd.DistributedOptimizer(o, **options), rows=rows)
    tolerance = 0.02 if "compression" in options else 1e-5
    check(result, train(range(2), make, plain, rows=rows), rtol=tolerance, atol=tolerance)


@pair
@pytest.mark.parametrize("averages", [False, True])
def test_gradients_of_several_steps(world, averages):
    """Accumulating two steps equals training on joined batches."""

    def wrap(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(
            optimizer,
            backward_passes_per_step=2,
            average_aggregated_gradients=averages,
            sparse_as_dense=True,
        )

    result = train(this_rank(), lambda _: v1.train.GradientDescentOptimizer(0.1), wrap, rows=True)
    rate = 0.1 if averages else 0.2
    expected = train(
        range(2),
        lambda _: v1.train.GradientDescentOptimizer(rate),
        plain,
        rows=True,
        joined_steps=2,
    )
    expected["global_step:0"] *= 2  # all steps count
    check(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(1, 2)
def test_apply_gradients_requires_compute_gradients(world):
    with tf.Graph().as_default():
        loss = loss_of(tf.ones([1, 3]), None, rows=False)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        variables = v1.trainable_variables()
        with pytest.raises(ModelError, match="requires gradients that this optimizer's"):
            optimizer.apply_gradients(zip(tf.gradients(loss, variables), variables))


@pair
@pytest.mark.parametrize("passes", [1, 2])
def test_without_a_session(world, in_mode, passes):
    """The gradient of each rank is rank + 1."""
    weight = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(0.125), backward_passes_per_step=passes
    )

    def step():
        optimizer.minimize(lambda: (hvd.rank() + 1.0) * tf.reduce_sum(weight), var_list=[weight])

    run = in_mode(step)
    weights = []
    for _ in range(4):
        run()
        weights.append(float(weight[0]))
    changes = [1.5 * 0.125 * passes * ((n + 1) // passes) for n in range(4)]
    assert weights == [1 - change for change in changes]
