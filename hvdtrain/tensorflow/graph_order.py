"""The collectives of a graph; in functions, also their order.

All ranks must make the same collective calls in the same order. A tf.function runs operations with
effects in the order in which they were made ("automatic control dependencies"), except branches,
loops and calls of functions: these wait for others that use the same variables, and for nothing
else. The bodies of ``tf.cond`` and ``tf.while_loop`` in classic graphs, and the functions that
``tf.compat.v1.wrap_function`` makes, have no order at all.
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
    "NoShadowError",
    "calls_between_ranks",
    "collectives_of",
    "put_in_order",
    "shadow",
]

MARK = "hvdtrain"
"""The prefix of the names of collectives."""

logger = logging.getLogger(__name__)

_function_attributes: dict[str, list[str]] = {}
"""The attributes that name functions, by type of operation."""


class NoShadowError(Exception):
    """A step can't be skipped on a rank that takes part in its collectives with zeros."""


def calls_between_ranks(op: tf.Operation) -> bool:
    """Return whether an operation is a collective, or calls a function that contains one."""
    return _is_or_calls_collective(op.graph, op, set())


def collectives_of(graph: Any) -> list[tf.Operation]:
    """Return the collectives of a graph, in the order in which they were made."""
    return list(filter(calls_between_ranks, graph.get_operations()))


def shadow(collectives: Sequence[tf.Operation]) -> None:
    """Add collectives like these to the graph that is being made, each with zeros.

    Raises:
        NoShadowError: One is part of a loop, a branch or a call of a function, runs on
            devices, or takes a tensor whose shape is not known.
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
    """Let the collectives of a function run in the order in which they were made.

    Returns:
        The collectives. They run whether their results are used or not, and a call of the function
        ends after they have, so that what comes next can wait for them.
    """
    operations = collectives_of(graph)
    for before, operation in pairwise(operations):
        add_control_input(operation, before)
    return operations


def _is_or_calls_collective(graph: Any, node: Any, known: set[str]) -> bool:
    """Search an operation or a ``NodeDef``; ``known`` are functions without collectives."""
    definition = isinstance(node, tf.compat.v1.NodeDef)
    kind = node.op if definition else node.type
    if kind == "PyFunc":
        return bool(node.name.rpartition("/")[2].startswith(MARK))
    for name in _functions_of(node) if definition else _functions_of_operation(node):
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
        # Most functions contain no collective, so they must not fail because of it.
        logger.warning(
            "cannot read TensorFlow's function %s (%s: %s); if ranks communicate in it, they may "
            "do so in different orders",
            name,
            type(error).__name__,
            error,
        )
        return ()


def _functions_of_operation(op: tf.Operation) -> Iterable[str]:
    # Definitions of operations may hold large constants: read those of few types only.
    if op.type not in _function_attributes:
        _function_attributes[op.type] = [
            attribute.name
            for attribute in op.op_def.attr
            if attribute.type in ("func", "list(func)")
        ]
    return _functions_of(op.node_def) if _function_attributes[op.type] else ()


def _functions_of(node: Any) -> Iterable[str]:
    for value in node.attr.values():
        yield from (function.name for function in (value.func, *value.list.func) if function.name)
