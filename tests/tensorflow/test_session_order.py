"""Classic graphs: ranks whose operations are ready in different orders run them as they were made.

Each test delays another operation on each rank; in the wrong order numbers would be mixed up, as
all operations have one shape and, but for their numbers, one name.
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
from hvdtrain.errors import ConfigurationError, MismatchError
from hvdtrain.horovod.broadcast import broadcast_variables
from hvdtrain.horovod.exchange_ops import allgather, alltoall, broadcast_
from hvdtrain.horovod.op_constants import Sum
from hvdtrain.horovod.reduction_ops import allreduce

v1 = tf.compat.v1
pair = pytest.mark.ranks(2)


@contextmanager
def session(version: int = 2) -> Iterator[Any]:
    """A graph and its session, with the control flow of a version of TensorFlow."""
    (v1.disable_control_flow_v2, v1.enable_control_flow_v2)[version - 1]()
    config = v1.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
    try:
        with tf.Graph().as_default(), v1.Session(config=config) as opened:
            yield opened
    finally:
        v1.enable_control_flow_v2()


CONTROL_FLOWS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])


def late(value: Any, rank: int) -> tf.Tensor:
    """A float32 scalar that is late on one rank, and so is its gradient."""

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
def test_ready_in_another_order(world):
    with session() as run:
        sums = [total(10.0**n, n % 2) for n in range(6)]
        for _ in range(3):
            assert run.run(sums[::-1]) == [2 * 10.0**n for n in reversed(range(6))]


@pair
def test_what_is_not_fetched_is_not_run(world):
    """Its data may not be there, and nobody asked for its effects; the order stays among others."""
    with session() as run:
        fed = v1.placeholder(tf.float32, [])
        taken: list[float] = []

        def take(array: np.ndarray) -> np.ndarray:
            taken.append(float(array))
            return array

        first = total(10.0, 0)
        training = total(tf.numpy_function(take, [fed], tf.float32), 1)
        last = total(1000.0, 1)
        assert run.run([last, first]) == [2000.0, 20.0]
        assert run.run(last) == 2000.0
        assert not taken
        assert run.run([last, training, first], {fed: 100.0}) == [2000.0, 200.0, 20.0]
        assert taken == [100.0]
        assert run.run([last, training], {training: 1.0}) == [2000.0, 1.0]
        assert len(taken) == 1


@pair
def test_what_is_added_later_and_to_another_graph(world):
    """As a hook's; after the graph was finalized nothing is."""
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
def test_gradients_are_ordered_too(world):
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
    """A branch is between what was made before and after it, also where it isn't taken."""
    with session(version) as run:
        which = v1.placeholder(tf.bool, [])
        before = total(1.0, 0)
        either = tf.cond(which, lambda: total(2.0, 1), lambda: total(3.0, 1) + total(4.0, 0))
        nested = tf.cond(
            which, lambda: tf.cond(which, lambda: total(5.0, 0), lambda: 0.0), lambda: 0.0
        )
        after = total(6.0, 1)
        wanted = {True: [2.0, 4.0, 10.0, 12.0], False: [2.0, 14.0, 0.0, 12.0]}
        for taken in (True, False, True):
            found = run.run([before, either, nested, after], {which: taken})
            assert found == wanted[taken]
            assert run.run([after, either], {which: taken}) == [12.0, wanted[taken][1]]
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
def test_what_is_in_a_branch_in_a_branch_comes_before_what_follows(world, version, inner):
    """Both are ready at once, and each is late on a rank, after all else has been done."""
    traced = tf.function(lambda value: total(value, 0))
    with session(version) as run:
        first = total(1.0, 0)
        second = inner(first * 1.5, traced)
        third = tf.cond(first > 0.0, lambda: total(first * 10.0, 1), lambda: 0.0)
        assert run.run([third, second, first]) == [40.0, 6.0, 2.0]


@pair
@CONTROL_FLOWS
def test_loops(world, version):
    """Operations in a turn that don't depend on one another; one begins the next turn early."""
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
        # Each gradient is that of the sum of both ranks' losses.
        assert run.run([chosen, *v1.gradients(chosen, [x, y])]) == [6912.0, 3456.0, 2304.0]
        # A session goes by the one that it comes to first.
        enters = [op for op in run.graph.get_operations() if op.type == "Enter"]
        assert bool(enters) == (version == 1)
        assert {op.get_attr("parallel_iterations") for op in enters} <= {1}


@pair
def test_functions_that_are_called(world):
    """A tf.function that was traced before, called twice; and one without the order of its own."""
    compiled = tf.function(lambda value: total(value, 1))
    wrapped = v1.wrap_function(lambda: [total(1.0, 0), total(2.0, 1)], [])
    assert [float(value) for value in wrapped()] == [2.0, 4.0]
    with session() as run:
        mixed = [total(1.0, 0), compiled(2.0), total(3.0, 0), compiled(4.0)]
        assert run.run(mixed) == [2.0, 4.0, 6.0, 8.0]


@pair
@CONTROL_FLOWS
def test_what_a_branch_makes_and_does_not_use(world, version):
    """As TensorFlow has it: in new control flow it runs, in the old one it doesn't."""
    with session(version) as run:

        def branch() -> float:
            total(7.0, 0)
            return 0.0

        nothing = tf.cond(tf.constant(True), branch, lambda: 1.0)
        assert run.run([nothing, total(2.0, 1), total(3.0, 0)]) == [0.0, 4.0, 6.0]


@pair
def test_variables_in_place(world):
    with session() as run:
        variables = [v1.get_variable(f"v{n}", initializer=float(job.rank() + n)) for n in range(3)]
        given = broadcast_(variables, 1)
        run.run(v1.global_variables_initializer())
        assert run.run(given) == [1.0, 2.0, 3.0]
        assert run.run(variables) == [1.0, 2.0, 3.0]
        run.run(v1.global_variables_initializer())
        run.run(broadcast_variables(variables, 0))
        assert run.run(variables) == [0.0, 1.0, 2.0]


@pair
def test_the_gradient_of_alltoall_has_the_type_of_its_input(world):
    with session() as run:
        for dtype in (tf.float16, tf.float32, tf.float64):
            x = tf.ones([4], dtype)
            came, _ = alltoall(x, tf.constant([1, 3]))
            (slope,) = v1.gradients(came, x, [tf.ones_like(came, tf.float32)])
            assert slope.dtype == dtype
            np.testing.assert_array_equal(run.run(slope), np.ones(4))


def _differ() -> tf.Tensor:
    return allreduce(tf.ones(2 + job.rank()), name="odd")


def _bad_splits() -> tf.Tensor:
    return alltoall(tf.ones(3), tf.constant([1, 1]), name="odd")[0]


@pair
@pytest.mark.parametrize("way", ["eager", "session", "branch"])
@pytest.mark.parametrize(
    ("call", "ours", "tensorflows", "text"),
    [
        (_differ, MismatchError, tf.errors.FailedPreconditionError, "^Ranks made different calls"),
        (
            _bad_splits,
            ConfigurationError,
            tf.errors.InvalidArgumentError,
            r"^splits=\[1, 1\] don't",
        ),
    ],
    ids=["differ", "argument"],
)
def test_errors_are_horovods_and_ours(
    world, way: str, call: Callable[[], tf.Tensor], ours: type, tensorflows: type, text: str
):
    """And the next operation works."""

    def run_it() -> None:
        if way == "eager":
            call()
            return
        with session() as run:
            run.run(call() if way == "session" else tf.cond(tf.constant(True), call, call))

    with pytest.raises(ours, match=text) as error:
        run_it()
    assert isinstance(error.value, tensorflows)
    assert type(error.value).__name__ == ours.__name__
    np.testing.assert_array_equal(allgather(tf.constant([job.rank()])), [0, 1])
