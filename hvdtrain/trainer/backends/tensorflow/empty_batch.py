"""A training step of a rank whose batch has no rows, while other ranks still have rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.frameworks.tensorflow.graph_order import NoShadowError, collectives_of, shadow
from hvdtrain.trainer.backends.tensorflow.graph_random import GraphRankGenerator

__all__ = ["if_rows"]


def if_rows(
    rows: tf.Tensor,
    compute: Callable[[], Any],
    otherwise: Callable[[], None],
    generator: GraphRankGenerator,
    afterwards: Callable[[], Any],
) -> Any:
    """Call ``compute`` if this rank has rows. Otherwise only take part in its collectives.

    If this rank has no rows, ``otherwise`` is called. The collectives then receive zeros, and the
    results are zeros. ``generator`` draws as many random numbers as ``compute`` would draw.
    ``afterwards`` is the function that the caller will call next.

    Raises:
        NoShadowError: If the step runs eagerly. Also if it contains collectives that can't be
            called with zeros, or if ``afterwards`` uses tensors that exist only if there are rows.
    """
    if tf.executing_eagerly():
        raise NoShadowError("the operations of a step are known in graphs only")
    results: Any = None
    collectives: list[tf.Operation] = []
    specs: list[tuple[tf.TensorShape, tf.DType]] = []

    def run() -> list[tf.Tensor]:
        nonlocal results
        results = compute()
        collectives.extend(collectives_of(tf.compat.v1.get_default_graph()))
        leaves = [leaf for leaf in tf.nest.flatten(results) if leaf is not None]
        tensors = list(map(tf.convert_to_tensor, leaves))
        specs.extend((tensor.shape, tensor.dtype) for tensor in tensors)
        return tensors

    def skip() -> list[tf.Tensor]:
        shadow(collectives)
        if any(shape.rank is None for shape, _ in specs):
            raise NoShadowError("the shape of a result is not known")
        if _uses_inner_tensors(afterwards):
            raise NoShadowError("a metric holds tensors of its last update")
        generator.repeat()
        otherwise()
        return [tf.zeros([size or 0 for size in shape], dtype) for shape, dtype in specs]

    tensors = iter(tf.cond(rows > 0, run, skip))
    leaves = [leaf if leaf is None else next(tensors) for leaf in tf.nest.flatten(results)]
    return tf.nest.pack_sequence_as(results, leaves)


def _uses_inner_tensors(function: Callable[[], Any]) -> bool:
    """Return whether a function uses tensors of a graph that does not enclose the current graph."""
    graph: Any = tf.compat.v1.get_default_graph()
    results = tf.nest.flatten(function())
    used = [tensor for tensor, _ in graph.captures] + results
    enclosing = set()
    while graph is not None:
        enclosing.add(id(graph))
        graph = getattr(graph, "outer_graph", None)
    return any(tf.is_symbolic_tensor(t) and id(t.graph) not in enclosing for t in used)
