"""Collectives in graphs, and their order in functions.

All ranks must call the same collectives in the same order. A tf.function runs stateful operations
in the order of their creation ("automatic control dependencies"). But it orders two branches, loops
or function calls only if they use the same variables. There are operations that TensorFlow does not
order at all: those in the bodies of ``tf.cond`` and ``tf.while_loop`` in classic graphs, and those
in functions of ``tf.compat.v1.wrap_function``. This module adds the missing control dependencies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf

from hvdtrain.private_api.tensorflow import add_control_input, function_body

__all__ = [
    "MARK",
    "ON_DEVICES",
    "NoShadowError",
    "calls_between_ranks",
    "collectives_of",
    "operation_types",
    "put_in_order",
    "shadow",
]

MARK = "hvdtrain"
"""Prefix of the names of collectives."""

ON_DEVICES = "CollectiveReduceV2"
"""Type of the collectives that run on devices."""

logger = logging.getLogger(__name__)

# For each type of operation, whether its attributes can name functions.
_names_functions: dict[str, bool] = {}


class NoShadowError(Exception):
    """Raised if a rank can't skip a step, because its collectives can't be called with zeros."""


def calls_between_ranks(op: tf.Operation) -> bool:
    """Return whether an operation is a collective or calls a function that contains one."""
    return _is_or_calls_collective(op.graph, op, set())


def collectives_of(graph: Any) -> list[tf.Operation]:
    """Return the collectives of a graph in the order of their creation."""
    return list(filter(calls_between_ranks, graph.get_operations()))


def shadow(collectives: Sequence[tf.Operation]) -> None:
    """Add copies of collectives to the current graph, whose inputs are zeros.

    A rank that skips a step runs these copies instead, so that other ranks don't wait for it.

    Raises:
        NoShadowError: If a collective is inside a loop, branch or function call, runs on devices,
            or has an input of unknown shape.
    """
    for operation in collectives:
        shapes = [tensor.shape for tensor in operation.inputs]
        if operation.type != "PyFunc" or not all(shape.is_fully_defined() for shape in shapes):
            raise NoShadowError(f"{operation.name} can't run with zeros")
        tf.raw_ops.PyFunc(
            input=[tf.zeros(tensor.shape, tensor.dtype) for tensor in operation.inputs],
            token=operation.get_attr("token"),
            Tout=operation.get_attr("Tout"),
            name=MARK,
        )


def put_in_order(graph: Any) -> list[tf.Operation]:
    """Make the collectives of a function run in the order of their creation.

    Returns:
        The collectives. Each call of the function must run all collectives, even if their results
        are unused.
    """
    operations = collectives_of(graph)
    for before, operation in pairwise(operations):
        add_control_input(operation, before)
    return operations


def operation_types(graph: Any) -> set[str]:
    """Return the types of the operations in a graph and in the functions that it calls."""
    types: set[str] = set()
    functions: set[str] = set()
    pending = [(graph, node) for node in graph.get_operations()]
    while pending:
        graph, node = pending.pop()
        is_definition = isinstance(node, tf.compat.v1.NodeDef)
        types.add(node.op if is_definition else node.type)
        for name in _functions_of(node) if is_definition else _functions_of_operation(node):
            if name not in functions:
                functions.add(name)
                pending += [(getattr(n, "graph", graph), n) for n in _body(graph, name)]
    return types


def _is_or_calls_collective(graph: Any, node: Any, known: set[str]) -> bool:
    """Return whether an operation is a collective, or calls a function that contains one.

    The operation may also be a ``NodeDef``. Functions whose names are in ``known`` were searched
    before, and are not searched again.
    """
    is_definition = isinstance(node, tf.compat.v1.NodeDef)
    kind = node.op if is_definition else node.type
    if kind == "PyFunc":
        return bool(node.name.rpartition("/")[2].startswith(MARK))
    if kind == ON_DEVICES:
        return True
    for name in _functions_of(node) if is_definition else _functions_of_operation(node):
        if name not in known:
            known.add(name)
            body = _body(graph, name)
            if any(_is_or_calls_collective(getattr(n, "graph", graph), n, known) for n in body):
                return True
    return False


def _body(graph: Any, name: str) -> Iterable[Any]:
    try:
        return function_body(graph, name)
    except Exception as error:
        # Only log this, because the function may not contain any collectives.
        logger.warning(
            "cannot read TensorFlow function %s (%s: %s); its collectives may run in different "
            "orders on different ranks",
            name,
            type(error).__name__,
            error,
        )
        return ()


def _functions_of_operation(op: tf.Operation) -> Iterable[str]:
    # node_def is slow to read if it contains a large constant.
    if op.type not in _names_functions:
        attributes = op.op_def.attr
        _names_functions[op.type] = any(a.type in ("func", "list(func)") for a in attributes)
    return _functions_of(op.node_def) if _names_functions[op.type] else ()


def _functions_of(node: Any) -> Iterable[str]:
    for value in node.attr.values():
        yield from (function.name for function in (value.func, *value.list.func) if function.name)
