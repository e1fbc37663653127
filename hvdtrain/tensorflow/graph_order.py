"""The operations of a graph that are between ranks; in functions, also their order.

All ranks must meet in the same operations in the same order. A tf.function runs what has effects
in the order in which it was made ("automatic control dependencies"), but for branches, loops and
calls of functions: where these use variables, they wait for others that use the same ones, and for
nothing else. The bodies of ``tf.cond`` and ``tf.while_loop`` in classic graphs, and what
``tf.compat.v1.wrap_function`` makes, have no order at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import tensorflow as tf

from hvdtrain.private_api.tensorflow import add_control_input, function_graph

__all__ = ["MARK", "calls_between_ranks", "put_in_order"]

MARK = "hvdtrain"
"""The prefix of the names of operations between ranks."""

_function_attributes: dict[str, list[tuple[str, bool]]] = {}
"""The attributes that name functions, by type of operation, and whether they name several."""


def calls_between_ranks(op: tf.Operation) -> bool:
    """Whether it is an operation between ranks, or calls a function that holds one."""
    if op.type == "PyFunc":
        return op.name.rpartition("/")[2].startswith(MARK)
    graphs = [function_graph(op.graph, name) for name in _functions_of(op)]
    return any(any(map(calls_between_ranks, g.get_operations())) for g in graphs if g is not None)


def put_in_order(graph: Any) -> list[tf.Operation]:
    """Let the operations between ranks of a function run in the order in which they were made.

    Returns them: they run whether their results are used or not, and a call of the function has
    ended when they have, so that what comes after it can wait for them.
    """
    operations = list(filter(calls_between_ranks, graph.get_operations()))
    for before, operation in pairwise(operations):
        add_control_input(operation, before)
    return operations


def _functions_of(op: tf.Operation) -> Iterator[str]:
    kind = op.type
    if kind not in _function_attributes:
        _function_attributes[kind] = [
            (attribute.name, attribute.type == "list(func)")
            for attribute in op.op_def.attr
            if attribute.type in ("func", "list(func)")
        ]
    for name, several in _function_attributes[kind]:
        value = op.get_attr(name)
        yield from (function.name for function in (value if several else [value]))
