"""Checks of ``run_on_host`` and the other functions of one framework, named in the argument.

``test_tensors.py`` starts this program.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdtrain import frameworks
from hvdtrain.errors import MismatchError

NAME = sys.argv[1]
framework = frameworks.of(NAME)
run_on_host, to_tensor = framework.run_on_host, framework.to_tensor


class Tools:
    """What the cases need and frameworks write differently, here with TensorFlow."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        return tf.function(function, autograph=False)

    def gradient(self, function: Callable[[Any], Any], at: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(at)
            value = function(at)
        return tape.gradient(value, at)

    def cond(self, choice: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        import tensorflow as tf

        return tf.cond(choice, yes, no)

    def loop(self, count: int, body: Callable[[Any], Any], start: Any) -> Any:
        import tensorflow as tf

        return tf.while_loop(lambda n, _: n < count, lambda n, x: (n + 1, body(x)), (0, start))[1]

    def wait(self) -> None:
        """Wait until all functions have run."""


class Torch(Tools):
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        torch._dynamo.config.recompile_limit = 100  # one function serves all cases
        return torch.compile(function, backend="eager")  # which needs no C++ compiler

    def gradient(self, function: Callable[[Any], Any], at: Any) -> Any:
        import torch

        at = at.clone().requires_grad_()
        return torch.autograd.grad(function(at), at)[0]

    def cond(self, choice: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if choice else no()

    def loop(self, count: int, body: Callable[[Any], Any], start: Any) -> Any:
        for _ in range(count):
            start = body(start)
        return start


class Jax(Tools):
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        return jax.jit(function)

    def gradient(self, function: Callable[[Any], Any], at: Any) -> Any:
        import jax

        return jax.value_and_grad(function)(at)[1]

    def cond(self, choice: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        import jax

        return jax.lax.cond(choice, yes, no)

    def loop(self, count: int, body: Callable[[Any], Any], start: Any) -> Any:
        import jax

        return jax.lax.fori_loop(0, count, lambda _, x: body(x), start)

    def wait(self) -> None:
        import jax

        jax.effects_barrier()


tools = {"tensorflow": Tools, "torch": Torch, "jax": Jax}[NAME]()
Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def tensor(*values: float, dtype: Any = np.float32) -> Any:
    return to_tensor(np.asarray(values, dtype))


def values_of(tensor: Any) -> list[Any]:
    return framework.array_of(tensor).astype(np.float64).tolist()


class Record:
    """Functions that remember their calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, label: str, value: Any) -> Any:
        """Return twice the value of a tensor."""

        def host(array: np.ndarray) -> list[np.ndarray]:
            assert type(array) is np.ndarray
            self.seen.append((label, *np.atleast_1d(array).tolist()))
            return [array * 2]

        return run_on_host(host, [value], [tuple(value.shape)])[0]


def returns_results_of_given_shapes_and_types(way: Way) -> None:
    def host(x: np.ndarray, y: np.ndarray) -> list[Any]:
        return [np.float64(x.sum()), np.concatenate([y, y]), [True, False]]

    def call(x: Any, y: Any) -> Any:
        return run_on_host(host, [x, y], [(), (4,), (2,)], [np.float32, np.int32, np.bool_])

    results = way(call)(tensor(1, 2), tensor(3, 4, dtype=np.int32))
    kinds = [(framework.numpy_type(r).name, framework.static_shape(r)) for r in results]
    assert kinds == [("float32", ()), ("int32", (4,)), ("bool", (2,))], kinds
    assert list(map(values_of, results)) == [3, [3, 4, 3, 4], [1, 0]]


def keeps_types(way: Way) -> None:
    seen = []

    def host(x: np.ndarray, y: np.ndarray) -> list[Any]:
        seen.append((x.dtype, y.dtype, x.shape, y.shape))
        return [x, y]

    step = way(lambda x, y: run_on_host(host, [x, y], [(2,), ()]))
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.int32, np.bool_):
        array = np.asarray([1, 0], dtype)
        results = step(to_tensor(array), to_tensor(array[0]))
        tools.wait()
        assert seen.pop() == (dtype, dtype, (2,), ())
        assert [framework.numpy_type(r) for r in results] == [dtype, dtype], results
        assert list(map(values_of, results)) == [[1, 0], 1]


def runs_without_results_and_without_arguments(way: Way) -> None:
    seen: list[int] = []

    def call(x: Any) -> Any:
        assert run_on_host(lambda: seen.append(1) or [], [], []) == []
        assert run_on_host(lambda x: seen.append(int(x[0])) or [], [x], []) == []
        return x + 1

    step = way(call)
    step(tensor(2))
    step(tensor(3))
    tools.wait()
    assert seen == [1, 2, 1, 3], seen


def runs_calls_in_order(way: Way) -> None:
    record = Record()

    def call(x: Any) -> Any:
        a = record.note("a", x)
        record.note("b", x)  # no result depends on it
        c = record.note("c", x * 3)
        return a + c, record.note("d", a)

    step = way(call)
    for number in (1, 2):
        results = step(tensor(number))
    tools.wait()
    assert list(map(values_of, results)) == [[16], [8]]
    expected = [("a", 1), ("b", 1), ("c", 3), ("d", 2), ("a", 2), ("b", 2), ("c", 6), ("d", 4)]
    assert record.seen == expected, record.seen


def runs_in_branches_and_loops(way: Way) -> None:
    record = Record()

    def call(x: Any, choice: Any) -> Any:
        def inner() -> Any:
            return tools.cond(choice[0] < 2, lambda: record.note("low", x), lambda: x)

        before = record.note("before", x)
        result = tools.cond(choice[0] > 0, inner, lambda: record.note("none", x))
        return tools.loop(2, lambda y: record.note("loop", y), result), before

    step = way(call)
    results = [values_of(step(tensor(5), tensor(choice))[0]) for choice in (0, 1, 2)]
    tools.wait()
    assert results == [[40], [40], [20]], results
    assert [label for label, _ in record.seen] == [
        *("before", "none", "loop", "loop"),
        *("before", "low", "loop", "loop"),
        *("before", "loop", "loop"),
    ], record.seen


def is_constant_for_differentiation(way: Way) -> None:
    record = Record()

    def loss(x: Any) -> Any:
        weight = tools.cond(x[0] > 0, lambda: record.note("weight", x), lambda: x * 0)
        return (x * weight)[0]

    if NAME == "torch":  # as in Keras, torch.compile does not see the backward pass
        step = functools.partial(tools.gradient, way(loss))
    else:
        step = way(functools.partial(tools.gradient, loss))
    assert values_of(step(tensor(3))) == [6]
    tools.wait()
    assert record.seen == [("weight", 3.0)], record.seen


def finds_errors_and_works_after_them(way: Way) -> None:
    causes, kept, record = [MismatchError("ranks differ")], [], Record()

    def host(array: np.ndarray) -> list[np.ndarray]:
        if causes:
            kept.append(causes.pop())
            raise kept[0]
        return [array]

    step = way(lambda x: record.note("after", run_on_host(host, [x], [(1,)])[0]))
    with pytest.raises((MismatchError, *framework.ERRORS), match="ranks differ"):
        values_of(step(tensor(1)))
    assert len(kept) == 1
    assert record.seen == []
    assert values_of(step(tensor(4))) == [8]
    tools.wait()
    assert record.seen == [("after", 4.0)], record.seen


def scales(way: Way) -> None:
    nan, scaled = tensor(float("nan"), float("inf"), 2), way(framework.scaled)
    assert values_of(scaled(nan, tensor(0)[0])) == [0, 0, 0]
    assert values_of(scaled(tensor(3, 2), tensor(1.5)[0])) == [4.5, 3]
    half = scaled(tensor(3, 2, dtype=ml_dtypes.bfloat16), tensor(0.5)[0])
    assert framework.numpy_type(half) == ml_dtypes.bfloat16
    assert values_of(half) == [1.5, 1]
    assert values_of(way(lambda x: framework.scaled(x, 0.0))(nan)) == [0, 0, 0]
    assert values_of(way(lambda x: framework.scaled(x, 2))(tensor(3))) == [6]
    assert values_of(way(lambda x: framework.scaled(x, 1.0))(tensor(3))) == [3]
    half = way(lambda x: framework.scaled(x, 0.5))(tensor(3, dtype=ml_dtypes.bfloat16))
    assert framework.numpy_type(half) == ml_dtypes.bfloat16


def converts(way: Way) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    array.flags.writeable = False
    for value in (array, array[:, ::-1], np.float32(3), 2.5, 1, True):
        assert np.array_equal(framework.array_of(to_tensor(value)), value), value
    one = way(lambda like: framework.scalar(1.5, like))(tensor(1, dtype=ml_dtypes.bfloat16))
    assert (framework.numpy_type(one), framework.static_shape(one)) == (ml_dtypes.bfloat16, ())
    assert values_of(one) == 1.5
    assert values_of(way(framework.scalar)(one, tensor(1))) == 1.5
    later = []
    way(lambda: later.append(framework.runs_later()))()
    assert later == [NAME == "tensorflow" and way == tools.compiled]


CASES = [
    returns_results_of_given_shapes_and_types,
    keeps_types,
    runs_without_results_and_without_arguments,
    runs_calls_in_order,
    runs_in_branches_and_loops,
    is_constant_for_differentiation,
    finds_errors_and_works_after_them,
    scales,
    converts,
]

if __name__ == "__main__":
    for case in CASES:
        print(case.__name__, flush=True)
        case(lambda function: function)
        case(tools.compiled)
    others = {"tensorflow", "torch", "jax"} - {NAME}
    print("loaded:", *sorted(others & set(sys.modules)))
