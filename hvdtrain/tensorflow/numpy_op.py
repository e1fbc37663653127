"""NumPy code that runs on the host, on tensors wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.private_api.tensorflow import complete_functions, replace_session_methods
from hvdtrain.tensorflow.graph_order import MARK, put_in_order
from hvdtrain.tensorflow.session_order import SessionOrder
from hvdtrain.tensorflow.tf_errors import raise_as_in_tensorflow

__all__ = ["Arrays", "run_on_host"]

Arrays = Sequence[np.ndarray]


def run_on_host(
    function: Callable[..., Arrays],
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[Any],
    types: Sequence[tf.DType] | None = None,
) -> list[tf.Tensor]:
    """Run NumPy code on tensors: at once, or as an operation of the graph that is being made.

    It may call the engine. Ranks must do so in the same order, so graphs keep the order in which
    such functions were added to them.

    Args:
        function: Takes an array for each tensor.
        tensors: What it is given.
        shapes: What is known of the shapes of its results.
        types: Types of its results; those of the first ``tensors`` if not given.
    """
    types = types or [tensor.dtype for tensor in tensors[: len(shapes)]]
    if tf.executing_eagerly():
        with raise_as_in_tensorflow():
            results = function(*map(_array, tensors))
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, types)]
    # A session has no public way to do something before each run.
    replace_session_methods(_keeping_order)
    complete_functions(put_in_order)
    several = tf.numpy_function(function, tensors, types, name=MARK)
    # Of no results TensorFlow returns the operation.
    results = several if shapes else []
    for tensor, shape in zip(results, shapes):
        tensor.set_shape(shape)
    return list(results)


def _array(tensor: tf.Tensor) -> np.ndarray:
    if tensor.dtype == tf.bfloat16 and not tensor.shape.rank:
        # TensorFlow 2.21 makes no NumPy array of such a tensor.
        return np.asarray(tf.reshape(tensor, [1])).reshape(())
    return np.asarray(tensor)


def _keeping_order(extend: Callable[..., Any], run: Callable[..., Any]) -> tuple[Any, Any]:
    """Methods of a session that keep the order of operations between ranks, as they were made.

    Their errors are raised as eagerly.
    """

    def extend_graph(self: Any) -> None:
        SessionOrder.of(self.graph).extend()
        extend(self)

    def do_run(
        self: Any, handle: Any, targets: Any, fetches: Any, feeds: Any, options: Any, metadata: Any
    ) -> Any:
        order = SessionOrder.of(self.graph)
        order.extend()
        # What partial_run is to run later is not known yet.
        left_out = order.left_out(targets, fetches, feeds) if handle is None else {}
        with raise_as_in_tensorflow():
            return run(self, handle, targets, fetches, feeds | left_out, options, metadata)

    return extend_graph, do_run
