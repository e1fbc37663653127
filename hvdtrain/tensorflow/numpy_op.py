"""NumPy code that runs on the host, on tensors wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.tensorflow import session_patch
from hvdtrain.tensorflow.graph_order import MARK, in_order
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

    It may call the engine. Ranks must do so in the same order: a tf.function sees to that by
    itself, and other graphs keep the order in which such functions were added to them.

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
    session_patch.keep_order()
    with in_order(tf.compat.v1.get_default_graph()):
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
