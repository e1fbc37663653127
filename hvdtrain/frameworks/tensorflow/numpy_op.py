"""NumPy functions that run as TensorFlow operations on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.graph_order import MARK, put_in_order
from hvdtrain.frameworks.tensorflow.session_order import SessionOrder
from hvdtrain.frameworks.tensorflow.tf_errors import raise_as_in_tensorflow
from hvdtrain.frameworks.variable_names import without_counts
from hvdtrain.private_api.tensorflow import complete_functions, replace_session_methods

__all__ = ["Arrays", "operation_label", "run_on_host"]

Arrays = Sequence[np.ndarray]


def run_on_host(
    function: Callable[..., Arrays],
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[Any],
    types: Sequence[tf.DType] | None = None,
) -> list[tf.Tensor]:
    """Run a NumPy function on tensors, immediately or as an operation of the current graph.

    The function may call collectives. In a graph, functions that were added in this way run in the
    order in which they were added.

    Args:
        function: Function that takes an array for each tensor and returns a sequence of arrays.
        tensors: Arguments of the function.
        shapes: Static shapes of the results.
        types: Types of the results. By default, each result has the type of the tensor at the same
            position in ``tensors``.
    """
    types = types or [tensor.dtype for tensor in tensors[: len(shapes)]]
    if tf.executing_eagerly():
        with raise_as_in_tensorflow():
            results = function(*map(_as_array, tensors))
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, types)]
    replace_session_methods(_ordered_session_methods)
    complete_functions(put_in_order)
    results = tf.numpy_function(function, tensors, types, name=MARK)
    if not shapes:
        return []  # TensorFlow returns the operation
    for tensor, shape in zip(results, shapes):
        tensor.set_shape(shape)
    return list(results)


def operation_label(kind: str, name: str | None, tensors: Sequence[tf.Tensor]) -> str:
    """Return the name of an operation for error messages.

    In a graph, the name of an unnamed operation consists of its kind, its first tensor and its last
    tensor. In eager mode, the name is empty, because tensors are unnamed.
    """
    if name is not None:
        return name
    if tf.executing_eagerly():
        return ""
    names = [without_counts(tensor.name.partition(":")[0]) for tensor in (tensors[0], tensors[-1])]
    return f"{kind} of {' to '.join(dict.fromkeys(names))}"


def _as_array(tensor: tf.Tensor) -> np.ndarray:
    if tensor.dtype == tf.bfloat16 and not tensor.shape.rank:
        # TensorFlow 2.21 can't convert a scalar of this type.
        return np.asarray(tf.reshape(tensor, [1])).reshape(())
    return np.asarray(tensor)


def _ordered_session_methods(extend: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Return replacements for two methods of sessions.

    With these methods, a session runs collectives in order, and raises the same errors as eager
    execution.
    """

    def extend_graph(self: Any) -> None:
        SessionOrder.of(self.graph).extend()
        extend(self)

    def do_run(
        self: Any, handle: Any, targets: Any, fetches: Any, feeds: Any, options: Any, metadata: Any
    ) -> Any:
        order = SessionOrder.of(self.graph)
        order.extend()
        # With a handle, this is partial_run, whose later fetches are not known yet.
        skipped = order.feeds_to_skip(targets, fetches, feeds) if handle is None else {}
        with raise_as_in_tensorflow():
            return run(self, handle, targets, fetches, feeds | skipped, options, metadata)

    return extend_graph, do_run
