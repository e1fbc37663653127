"""Functions run what is between ranks in the order of its making, whatever variables they use.

What comes first takes a while each time; out of order, what comes next would overtake it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.tensorflow.numpy_op import run_on_host


class Program:
    """Makes operations that note when they run, and branches and functions that use variables."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self._variables = [tf.Variable(0.0), tf.Variable(0.0)]

    def slow(self, number: int, value: Any = 0.0) -> tf.Tensor:
        return self._note(number, 0.1, value)

    def quick(self, number: int, value: Any = 0.0) -> tf.Tensor:
        return self._note(number, 0.0, value)

    def branch(self, make: Callable[[], tf.Tensor], variable: int = 0) -> tf.Tensor:
        def body() -> tf.Tensor:
            self._variables[variable].assign_add(1.0)
            return make()

        return tf.cond(tf.random.uniform([]) < 2.0, body, lambda: tf.constant(0.0))

    def function(self, make: Callable[[], tf.Tensor], variable: int = 0) -> tf.Tensor:
        @tf.function
        def inner() -> tf.Tensor:
            self._variables[variable].assign_add(1.0)
            return make()

        return inner()

    def _note(self, number: int, wait_s: float, value: Any) -> tf.Tensor:
        def run(array: np.ndarray) -> list[np.ndarray]:
            time.sleep(wait_s)
            self.ran.append(number)
            return [array]

        return run_on_host(run, [tf.convert_to_tensor(value)], [[]])[0]


def branch_comes_after(made: Program) -> None:
    made.slow(0)
    made.branch(lambda: made.quick(1))


def branch_comes_before(made: Program) -> None:
    made.branch(lambda: made.slow(0))
    made.quick(1)


def branches_with_other_variables(made: Program) -> None:
    made.branch(lambda: made.slow(0), variable=0)
    made.branch(lambda: made.quick(1), variable=1)


def branches_in_branches(made: Program) -> None:
    def body() -> tf.Tensor:
        made.branch(lambda: made.slow(1), variable=1)
        return made.quick(2)

    made.slow(0)
    made.branch(body)


def functions(made: Program) -> None:
    made.slow(0)
    made.function(lambda: made.slow(1), variable=0)
    made.function(lambda: made.quick(2), variable=1)


def loop(made: Program) -> None:
    made.slow(0)
    for _ in tf.range(2):
        made.branch(lambda: made.slow(1))
        made.quick(2)
    made.quick(3)


def gradient_and_then_a_branch(made: Program) -> None:
    """As where gradients are accumulated: those of some variables are there before the others."""

    @tf.custom_gradient
    def first(value: tf.Tensor) -> Any:
        return tf.identity(value), lambda upstream: made.slow(0, upstream)

    x, y = tf.constant(1.0), tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        result = first(x) * y
    _, of_y = tape.gradient(result, [x, y])
    made.branch(lambda: made.quick(1, of_y))


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (branch_comes_after, [0, 1]),
        (branch_comes_before, [0, 1]),
        (branches_with_other_variables, [0, 1]),
        (branches_in_branches, [0, 1, 2]),
        (functions, [0, 1, 2]),
        (loop, [0, 1, 2, 1, 2, 3]),
        (gradient_and_then_a_branch, [0, 1]),
    ],
)
def test_order(make: Callable[[Program], None], order: list[int]) -> None:
    made = Program()

    @tf.function
    def run() -> None:
        make(made)

    run()
    assert made.ran == order
