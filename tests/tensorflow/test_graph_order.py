"""Functions run collectives in the order in which they were made, whatever variables they use.

What comes first takes a while each time; out of order, what comes next would overtake it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.tensorflow import graph_order
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


def imported_functions(made: Program) -> None:
    """Of an imported graph TensorFlow keeps the definitions of functions, and no graphs."""
    with tf.Graph().as_default() as graph:
        tf.identity(tf.cond(tf.random.uniform([]) < 2.0, lambda: made.slow(0), lambda: 0.0))
    tf.graph_util.import_graph_def(graph.as_graph_def(), name="imported")
    made.branch(lambda: made.quick(1))


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
        (imported_functions, [0, 1]),
    ],
)
def test_order(make: Callable[[Program], None], order: list[int]) -> None:
    made = Program()

    @tf.function
    def run() -> None:
        make(made)

    run()
    assert made.ran == order


def ctc_loss() -> float:
    """Return the loss of two frames that are 0 or 1 with 0.5 each, for the label 0.

    The paths are 00, 0 and blank, and blank and 0; CTC is made of ``Defun``.
    """

    @tf.function
    def loss() -> tf.Tensor:
        return tf.nn.ctc_loss([[0]], tf.zeros([2, 1, 2]), [1], [2], blank_index=1)[0]

    return float(loss())


@pytest.fixture
def warnings_logged(monkeypatch, caplog):
    """Log records after the first collective in a function: from then on functions are read."""
    made = Program()
    made.function(lambda: made.quick(0))
    monkeypatch.setattr(logging.getLogger("hvdtrain"), "propagate", True)
    return caplog


def test_functions_of_defun(warnings_logged) -> None:
    assert ctc_loss() == pytest.approx(-np.log(0.75))
    assert not warnings_logged.records


def test_a_function_that_cannot_be_read_is_not_ordered(monkeypatch, warnings_logged) -> None:
    def unreadable(graph: Any, name: str) -> Any:
        raise AttributeError("no definition")

    monkeypatch.setattr(graph_order, "function_body", unreadable)
    assert ctc_loss() == pytest.approx(-np.log(0.75))
    assert "cannot read TensorFlow's function" in warnings_logged.text
    assert "(AttributeError: no definition)" in warnings_logged.text
