"""The operations of a training step in TensorFlow."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.private_api.tensorflow import function_body
from tests.trainer.features import X, Y


def operations(graph: Any) -> Iterator[Any]:
    """Yield the operations that a step runs, one for each cluster."""
    for operation in graph.get_operations():
        yield operation
        if not is_cluster(operation):
            for value in operation.node_def.attr.values():
                for function in (value.func, *value.list.func):
                    body = function_body(graph, function.name) if function.name else ()
                    if first := next(iter(body), None):
                        yield from operations(first.graph)


def is_cluster(operation: Any) -> bool:
    return bool(operation.node_def.attr["_XlaMustCompile"].b)


def traced(model: keras.Model) -> list[Any]:
    """Return the operations of a training step."""
    step = tf.function(model.train_step, autograph=False)
    return list(operations(step.get_concrete_function((X[:4], Y[:4])).graph))


def clusters(model: keras.Model) -> int:
    """Return the number of parts of a training step that XLA compiles."""
    return sum(map(is_cluster, traced(model)))
