"""The order of collectives in sessions, which is the order of creation, not of readiness.

Each test delays different operations on each rank. All operations have the same shape and name, so
that a wrong order would mix up their values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.compat.horovod.broadcast import broadcast_variables
from hvdtrain.compat.horovod.collective_ops import allgather, allreduce, alltoall, broadcast_
from hvdtrain.compat.horovod.reduction_arguments import Sum
from hvdtrain.errors import ConfigurationError, MismatchError

v1 = tf.compat.v1
pair = pytest.mark.ranks(2)


@contextmanager
def session(version: int = 2) -> Iterator[Any]:
    """Open a session of a new graph, with the control flow of TensorFlow 1 or 2."""
    (v1.disable_control_flow_v2, v1.enable_control_flow_v2)[version - 1]()
    config = v1.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
    try:
        with tf.Graph().as_default(), v1.Session(config=config) as opened:
            yield opened
    finally:
        v1.enable_control_flow_v2()


CONTROL_FLOWS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])


def late(value: Any, rank: int) -> tf.Tensor:
    """Return a float32 scalar that is delayed on one rank, as is its gradient."""

    @tf.custom_gradient
    def both(value: tf.Tensor) -> Any:
        return _delayed(value, rank), lambda upstream: _delayed(upstream, rank)

    return both(tf.convert_to_tensor(value, tf.float32))


def _delayed(value: Any, rank: int) -> tf.Tensor:
    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(0.1 * (job.rank() == rank))
        return array

    delayed = tf.numpy_function(wait, [value], tf.float32)
    return tf.ensure_shape(delayed, [])


def total(value: Any, late_on: int) -> tf.Tensor:
    return allreduce(late(value, late_on), op=Sum, name="x")


@pair
def test_operations_that_become_ready_in_a_different_order(world):
    with session() as run:
        sums = [total(10.0**n, n % 2) for n in range(6)]
        for _ in range(3):
            assert run.run(sums[::-1]) == [2 * 10.0**n for n in reversed(range(6))]


@pair
def test_collectives_that_are_not_fetched_do_not_run(world):
    with session() as run:
        fed = v1.placeholder(tf.float32, [])
        consumed: list[float] = []

        def consume(array: np.ndarray) -> np.ndarray:
            consumed.append(float(array))
            return array

        first = total(10.0, 0)
        training = total(tf.numpy_function(consume, [fed], tf.float32), 1)
        last = total(1000.0, 1)
        assert run.run([last, first]) == [2000.0, 20.0]
        assert run.run(last) == 2000.0
        assert not consumed
        assert run.run([last, training, first], {fed: 100.0}) == [2000.0, 200.0, 20.0]
        assert consumed == [100.0]
        assert run.run([last, training], {training: 1.0}) == [2000.0, 1.0]
        assert len(consumed) == 1


@pair
def test_collectives_that_are_added_later_and_to_another_graph(world):
    with session() as one, session() as other:
        with one.graph.as_default():
            sums = [total(1.0, 0), total(2.0, 1)]
            assert one.run(sums) == [2.0, 4.0]
            sums += [total(3.0, 0), total(4.0, 1)]
            one.graph.finalize()
            assert one.run(sums) == [2.0, 4.0, 6.0, 8.0]
            assert one.graph.finalized
        with other.graph.as_default():
            assert other.run([total(5.0, 0), total(6.0, 1)]) == [10.0, 12.0]
    with v1.Session(graph=one.graph) as again:
        assert again.run(sums[::-1]) == [8.0, 6.0, 4.0, 2.0]


@pair
def test_gradients_run_in_order(world):
    with session() as run:
        inputs = [tf.constant(float(n)) for n in range(4)]
        squares = [total(x * x, n % 2) for n, x in enumerate(inputs)]
        slopes = [v1.gradients(y, x)[0] for x, y in zip(inputs, squares)]
        late_slopes = [late(slope, n % 2) for n, slope in enumerate(slopes)]
        again = [total(slope, 1 - n % 2) for n, slope in enumerate(late_slopes)]
        assert run.run([again, slopes]) == [[0.0, 8.0, 16.0, 24.0], [0.0, 4.0, 8.0, 12.0]]


@pair
@CONTROL_FLOWS
def test_branches(world, version):
    with session(version) as run:
        which = v1.placeholder(tf.bool, [])
        before = total(1.0, 0)
        either = tf.cond(which, lambda: total(2.0, 1), lambda: total(3.0, 1) + total(4.0, 0))
        nested = tf.cond(
            which, lambda: tf.cond(which, lambda: total(5.0, 0), lambda: 0.0), lambda: 0.0
        )
        after = total(6.0, 1)
        expected = {True: [2.0, 4.0, 10.0, 12.0], False: [2.0, 14.0, 0.0, 12.0]}
        for taken in (True, False, True):
            values = run.run([before, either, nested, after], {which: taken})
            assert values == expected[taken]
            assert run.run([after, either], {which: taken}) == [12.0, expected[taken][1]]
        assert run.run(after) == 12.0


def inner_branches(x: tf.Tensor, traced: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.cond(x > 0.0, lambda: tf.cond(x > 1.0, lambda: total(x, 0), lambda: x), lambda: x)


def inner_function(x: tf.Tensor, traced: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.cond(x > 0.0, lambda: traced(x), lambda: x)


def inner_loop(x: tf.Tensor, traced: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    def looped() -> tf.Tensor:
        return tf.while_loop(lambda n, _: n < 1, lambda n, y: (n + 1, total(y, 0)), [0, x])[1]

    return tf.cond(x > 0.0, looped, lambda: x)


def branch_in_loop(x: tf.Tensor, traced: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    def turn(n: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return n + 1, tf.cond(x > 0.0, lambda: total(y, 0), lambda: y)

    return tf.while_loop(lambda n, _: n < 1, turn, [0, x])[1]


@pair
@CONTROL_FLOWS
@pytest.mark.parametrize(
    "inner", [inner_branches, inner_function, inner_loop, branch_in_loop], ids=lambda f: f.__name__
)
def test_nested_control_flow_runs_before_later_branches(world, version, inner):
    """Both operations become ready at the same time, and each is delayed on one rank."""
    traced = tf.function(lambda value: total(value, 0))
    with session(version) as run:
        first = total(1.0, 0)
        second = inner(first * 1.5, traced)
        third = tf.cond(first > 0.0, lambda: total(first * 10.0, 1), lambda: 0.0)
        assert run.run([third, second, first]) == [40.0, 6.0, 2.0]


@pair
@CONTROL_FLOWS
def test_loops(world, version):
    """Each iteration has independent collectives."""
    with session(version) as run:

        def turn(n: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, ...]:
            plus = tf.cond(tf.equal(n % 2, 0), lambda: total(1.0, 1), lambda: 0.0)
            hundred = total(late(100.0 + 0.0 * b, 1), 1)
            return n + 1, a + total(10.0 + 0.0 * a, 0) + plus, b + hundred

        before = total(1.0, 0)
        looped = tf.while_loop(lambda n, a, b: n < 4, turn, [0, 0.0, 0.0])
        after = total(3.0, 1)
        slope = v1.gradients(looped[1], before)[0]
        assert slope is None
        assert run.run([after, *looped, before]) == [6.0, 4, 84.0, 800.0, 2.0]
        assert run.run([after, before]) == [6.0, 2.0]


@pair
@CONTROL_FLOWS
def test_gradients_of_branches_and_loops(world, version):
    with session(version) as run:
        x, y = tf.constant(2.0), tf.constant(3.0)

        def turn(n: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return n + 1, total(a * 2.0, 0), total(b * 3.0, 1)

        _, a, b = tf.while_loop(lambda n, a, b: n < 2, turn, [0, x, y])
        chosen = tf.cond(x < y, lambda: total(a * b, 0), lambda: 0.0)
        # Gradients of the sum of both ranks' losses.
        assert run.run([chosen, *v1.gradients(chosen, [x, y])]) == [6912.0, 3456.0, 2304.0]
        # All operations that enter a loop must agree on parallel_iterations.
        enters = [op for op in run.graph.get_operations() if op.type == "Enter"]
        assert bool(enters) == (version == 1)
        assert {op.get_attr("parallel_iterations") for op in enters} <= {1}


@pair
def test_function_calls(world):
    compiled = tf.function(lambda value: total(value, 1))
    wrapped = v1.wrap_function(lambda: [total(1.0, 0), total(2.0, 1)], [])
    assert [float(value) for value in wrapped()] == [2.0, 4.0]
    with session() as run:
        mixed = [total(1.0, 0), compiled(2.0), total(3.0, 0), compiled(4.0)]
        assert run.run(mixed) == [2.0, 4.0, 6.0, 8.0]


@pair
@CONTROL_FLOWS
def test_unused_collectives_in_a_branch(world, version):
    """Unused collectives run only in the control flow of TensorFlow 2."""
    with session(version) as run:

        def branch() -> float:
            total(7.0, 0)
            return 0.0

        nothing = tf.cond(tf.constant(True), branch, lambda: 1.0)
        assert run.run([nothing, total(2.0, 1), total(3.0, 0)]) == [0.0, 4.0, 6.0]


@pair
def test_broadcast_of_variables(world):
    with session() as run:
        variables = [v1.get_variable(f"v{n}", initializer=float(job.rank() + n)) for n in range(3)]
        values = broadcast_(variables, 1)
        run.run(v1.global_variables_initializer())
        assert run.run(values) == [1.0, 2.0, 3.0]
        assert run.run(variables) == [1.0, 2.0, 3.0]
        run.run(v1.global_variables_initializer())
        run.run(broadcast_variables(variables, 0))
        assert run.run(variables) == [0.0, 1.0, 2.0]


@pair
def test_type_of_the_gradient_of_alltoall(world):
    with session() as run:
        for dtype in (tf.float16, tf.float32, tf.float64):
            x = tf.ones([4], dtype)
            rows, _ = alltoall(x, tf.constant([1, 3]))
            (slope,) = v1.gradients(rows, x, [tf.ones_like(rows, tf.float32)])
            assert slope.dtype == dtype
            np.testing.assert_array_equal(run.run(slope), np.ones(4))


def _differ() -> tf.Tensor:
    return allreduce(tf.ones(2 + job.rank()), name="odd")


def _bad_splits() -> tf.Tensor:
    return alltoall(tf.ones(3), tf.constant([1, 1]), name="odd")[0]


@pair
@pytest.mark.parametrize("mode", ["eager", "session", "branch"])
@pytest.mark.parametrize(
    ("call", "error", "tensorflow_error", "text"),
    [
        (_differ, MismatchError, tf.errors.FailedPreconditionError, "^Ranks made different calls"),
        (
            _bad_splits,
            ConfigurationError,
            tf.errors.InvalidArgumentError,
            "^splits must be 2 non-negative",
        ),
    ],
    ids=["differ", "argument"],
)
def test_errors_belong_to_hvdtrain_and_tensorflow(
    world, mode: str, call: Callable[[], tf.Tensor], error: type, tensorflow_error: type, text: str
):

    def run_it() -> None:
        if mode == "eager":
            call()
            return
        with session() as run:
            run.run(call() if mode == "session" else tf.cond(tf.constant(True), call, call))

    with pytest.raises(error, match=text) as caught:
        run_it()
    assert isinstance(caught.value, tensorflow_error)
    assert type(caught.value).__name__ == error.__name__
    # The next collective works.
    np.testing.assert_array_equal(allgather(tf.constant([job.rank()])), [0, 1])
