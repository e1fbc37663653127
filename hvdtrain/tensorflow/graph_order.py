"""Which operations of a graph are between ranks; in function graphs, also their order.

A tf.function runs what has effects in the order in which it was made ("automatic control
dependencies"). The bodies of ``tf.cond`` and ``tf.while_loop`` in classic graphs, and what
``tf.compat.v1.wrap_function`` makes, do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import tensorflow as tf

from hvdtrain.private_api.tensorflow import function_graph, orders_operations

__all__ = ["MARK", "calls_between_ranks", "in_order", "must_run"]

MARK = "hvdtrain"
"""What the names of operations between ranks begin with."""


def calls_between_ranks(op: tf.Operation) -> bool:
    """Whether it is an operation between ranks, or calls a function that holds one."""
    if op.type == "PyFunc":
        return op.name.rpartition("/")[2].startswith(MARK)
    graphs = [function_graph(op.graph, name) for name in _functions_of(op)]
    return any(any(map(calls_between_ranks, g.get_operations())) for g in graphs if g is not None)


@contextmanager
def in_order(graph: Any) -> Iterator[None]:
    """What is added within runs after all operations between ranks that were added before.

    Of no effect where TensorFlow sees to it, and in a graph for sessions, for which
    ``session_order`` does.
    """
    with tf.control_dependencies(list(_last_ones(graph))):
        yield


def must_run(graph: Any) -> list[tf.Operation]:
    """What a function runs, if its result is used or not: its operations between ranks.

    A call of the function has ended when they have, too, so that what comes after it can wait for
    them. Nothing, where TensorFlow sees to it.
    """
    if not _is_unordered_function(graph):
        return []
    return list(filter(calls_between_ranks, graph.get_operations()))


def _is_unordered_function(graph: Any) -> bool:
    return hasattr(graph, "outer_graph") and not orders_operations(graph)


def _last_ones(graph: Any) -> Iterator[tf.Operation]:
    """The last operation between ranks of a function graph and of those around it."""
    while _is_unordered_function(graph):
        yield from islice(filter(calls_between_ranks, reversed(graph.get_operations())), 1)
        graph = graph.outer_graph


def _functions_of(op: tf.Operation) -> Iterator[str]:
    for attribute in op.op_def.attr:
        if attribute.type == "func":
            yield op.get_attr(attribute.name).name
        elif attribute.type == "list(func)":
            yield from (function.name for function in op.get_attr(attribute.name))
