"""The order of collectives in functions, which is the order of their creation.

Earlier operations are slow, so that later ones would overtake them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.frameworks.tensorflow import graph_order
from hvdtrain.frameworks.tensorflow.tensors import run_on_host


class Program:
    """Adds operations that record when they run, and branches and functions with variables."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self._variables = [tf.Variable(0.0), tf.Variable(0.0)]

    def slow(self, number: int, value: Any = 0.0) -> tf.Tensor:
        return self._record(number, 0.1, value)

    def quick(self, number: int, value: Any = 0.0) -> tf.Tensor:
        return self._record(number, 0.0, value)

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

    def _record(self, number: int, wait_s: float, value: Any) -> tf.Tensor:
        def run(array: np.ndarray) -> list[np.ndarray]:
            time.sleep(wait_s)
            self.ran.append(number)
            return [array]

        return run_on_host(run, [tf.convert_to_tensor(value)], [[]])[0]


def branch_comes_after(program: Program) -> None:
    program.slow(0)
    program.branch(lambda: program.quick(1))


def branch_comes_before(program: Program) -> None:
    program.branch(lambda: program.slow(0))
    program.quick(1)


def branches_with_other_variables(program: Program) -> None:
    program.branch(lambda: program.slow(0), variable=0)
    program.branch(lambda: program.quick(1), variable=1)


def branches_in_branches(program: Program) -> None:
    def body() -> tf.Tensor:
        program.branch(lambda: program.slow(1), variable=1)
        return program.quick(2)

    program.slow(0)
    program.branch(body)


def functions(program: Program) -> None:
    program.slow(0)
    program.function(lambda: program.slow(1), variable=0)
    program.function(lambda: program.quick(2), variable=1)


def loop(program: Program) -> None:
    program.slow(0)
    for _ in tf.range(2):
        program.branch(lambda: program.slow(1))
        program.quick(2)
    program.quick(3)


def gradient_and_then_a_branch(program: Program) -> None:
    """Some gradients are ready before others, as with accumulated gradients."""

    @tf.custom_gradient
    def first(value: tf.Tensor) -> Any:
        return tf.identity(value), lambda upstream: program.slow(0, upstream)

    x, y = tf.constant(1.0), tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        result = first(x) * y
    _, of_y = tape.gradient(result, [x, y])
    program.branch(lambda: program.quick(1, of_y))


def imported_functions(program: Program) -> None:
    """TensorFlow keeps only definitions of the functions of an imported graph."""
    with tf.Graph().as_default() as graph:
        tf.identity(tf.cond(tf.random.uniform([]) < 2.0, lambda: program.slow(0), lambda: 0.0))
    tf.graph_util.import_graph_def(graph.as_graph_def(), name="imported")
    program.branch(lambda: program.quick(1))


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
    program = Program()

    @tf.function
    def run() -> None:
        make(program)

    run()
    assert program.ran == order


def ctc_loss() -> float:
    """Return a CTC loss, -log(0.75), which TensorFlow implements with ``Defun``."""

    @tf.function
    def loss() -> tf.Tensor:
        return tf.nn.ctc_loss([[0]], tf.zeros([2, 1, 2]), [1], [2], blank_index=1)[0]

    return float(loss())


@pytest.fixture
def warnings_logged(monkeypatch, caplog):
    """Log records after the first collective in a function, when functions are being read."""
    program = Program()
    program.function(lambda: program.quick(0))
    monkeypatch.setattr(logging.getLogger("hvdtrain"), "propagate", True)
    return caplog


def test_defun_functions(warnings_logged) -> None:
    assert ctc_loss() == pytest.approx(-np.log(0.75))
    assert not warnings_logged.records


def test_an_unreadable_function_is_a_warning(monkeypatch, warnings_logged) -> None:
    def unreadable(graph: Any, name: str) -> Any:
        raise AttributeError("no definition")

    monkeypatch.setattr(graph_order, "function_body", unreadable)
    assert ctc_loss() == pytest.approx(-np.log(0.75))
    assert "cannot read TensorFlow function" in warnings_logged.text
    assert "(AttributeError: no definition)" in warnings_logged.text
