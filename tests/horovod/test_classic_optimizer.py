"""Optimizers of tf.compat.v1.train on ranks, held against one process with the joint batch."""

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
Wrap = Callable[[Any], Any]


def batches(ranks: range, together: int = 1) -> list[dict[str, np.ndarray]]:
    """What these ranks learn from in each step, put together; also that of several steps."""
    steps = []
    for first in range(0, STEPS, together):
        several = range(first, first + together)
        rng = [np.random.default_rng([step, rank]) for step in several for rank in ranks]
        steps.append(
            {
                "x": np.concatenate([r.normal(size=(ROWS, 3)).astype(np.float32) for r in rng]),
                "words": np.concatenate([r.integers(0, 5, ROWS) for r in rng]),
            }
        )
    return steps


def loss_of(x: Any, words: Any, *, rows: bool) -> tf.Tensor:
    """Of a small net; its weights start alike. With ``rows`` they have a sparse gradient, too."""
    w = v1.get_variable("w", initializer=np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    b = v1.get_variable("b", initializer=np.zeros(4, np.float32))
    v1.get_variable("of_no_effect", initializer=np.zeros(2, np.float32))
    out = tf.nn.tanh(x @ w + b)
    if rows:
        table = v1.get_variable("table", initializer=np.ones((5, 4), np.float32))
        out += tf.nn.embedding_lookup(table, words)
    return tf.reduce_mean(tf.reduce_sum(out**2, axis=1))


def minimized(optimizer: Any, loss: tf.Tensor, global_step: Any) -> Any:
    return optimizer.minimize(loss, global_step=global_step)


def clipped(optimizer: Any, loss: tf.Tensor, global_step: Any) -> Any:
    """By the norm of all gradients, which must be that of the combined ones; with an average."""
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
    applied = optimizer.apply_gradients(zip(gradients, variables), global_step)
    average = v1.train.ExponentialMovingAverage(0.5, global_step)
    with tf.control_dependencies([applied]):
        return average.apply(v1.trainable_variables())


def trained(
    ranks: range,
    make: Callable[[Any], Any],
    wrap: Wrap,
    apply: Callable[..., Any] = minimized,
    *,
    rows: bool = False,
    together: int = 1,
) -> dict[str, np.ndarray]:
    """All variables after some steps in a session, slots and moving averages among them."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 3])
        words = v1.placeholder(tf.int64, [None])
        loss = loss_of(x, words, rows=rows)
        global_step = v1.train.get_or_create_global_step()
        rate = v1.train.exponential_decay(0.1, global_step, 2, 0.5)
        train = apply(wrap(make(rate)), loss, global_step)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for batch in batches(ranks, together):
                session.run(train, {x: batch["x"], words: batch["words"]})
            variables = v1.global_variables()
            return dict(zip([v.name for v in variables], session.run(variables)))


def plain(optimizer: Any) -> Any:
    return optimizer


def check(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], **tolerance: float) -> None:
    """As wanted, and to the last bit the same on all ranks."""
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], err_msg=name, **tolerance)
        every = hvd.allgather(np.reshape(value, [1, -1]), name=name).numpy()
        assert (every == every[0]).all(), name


def mine() -> range:
    return range(hvd.rank(), hvd.rank() + 1)


@pair
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("apply", [minimized, clipped])
def test_ranks_learn_as_one_process(world, name, apply):
    make = OPTIMIZERS[name]
    found = trained(mine(), make, hvd.DistributedOptimizer, apply)
    check(found, trained(range(2), make, plain, apply), rtol=1e-5, atol=1e-6)
    assert found["global_step:0"] == STEPS


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
    rows = "sparse_as_dense" in options  # as rows, momentum is another where there are none
    make = OPTIMIZERS["sgd" if rows else "momentum"]
    found = trained(mine(), make, lambda o: hvd.DistributedOptimizer(o, **options), rows=rows)
    near = 0.02 if "compression" in options else 1e-5
    check(found, trained(range(2), make, plain, rows=rows), rtol=near, atol=near)


@pair
@pytest.mark.parametrize("averages", [False, True])
def test_gradients_of_several_steps(world, averages):
    """The same as two of these batches at once, with the sum or the mean of their gradients."""

    def wrap(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(
            optimizer,
            backward_passes_per_step=2,
            average_aggregated_gradients=averages,
            sparse_as_dense=True,
        )

    found = trained(mine(), lambda _: v1.train.GradientDescentOptimizer(0.1), wrap, rows=True)
    rate = 0.1 if averages else 0.2
    wanted = trained(
        range(2),
        lambda _: v1.train.GradientDescentOptimizer(rate),
        plain,
        rows=True,
        together=2,
    )
    wanted["global_step:0"] *= 2  # every batch counts
    check(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(1, 2)
def test_gradients_come_from_compute_gradients(world):
    with tf.Graph().as_default():
        loss = loss_of(tf.ones([1, 3]), None, rows=False)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        variables = v1.trainable_variables()
        with pytest.raises(ModelError, match="has not computed"):
            optimizer.apply_gradients(zip(tf.gradients(loss, variables), variables))


@pair
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("passes", [1, 2])
def test_without_a_session(world, compiled, passes):
    """Each rank's gradient is its number plus one, in each of four steps."""
    weight = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(0.125), backward_passes_per_step=passes
    )

    def step():
        optimizer.minimize(lambda: (hvd.rank() + 1.0) * tf.reduce_sum(weight), var_list=[weight])

    run = tf.function(step) if compiled else step
    seen = []
    for _ in range(4):
        run()
        seen.append(float(weight[0]))
    each = [1.5 * 0.125 * passes * ((n + 1) // passes) for n in range(4)]
    assert seen == [1 - change for change in each]
