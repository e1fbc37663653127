"""NumPy functions that run as TensorFlow operations on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.frameworks.interface import Arrays, Shape, SparseRows
from hvdtrain.frameworks.tensorflow import indexed_slices
from hvdtrain.frameworks.tensorflow.graph_order import MARK, put_in_order
from hvdtrain.frameworks.tensorflow.session_order import SessionOrder
from hvdtrain.frameworks.tensorflow.tf_errors import raise_as_in_tensorflow
from hvdtrain.frameworks.variable_names import without_counts
from hvdtrain.private_api.tensorflow import complete_functions, replace_session_methods

__all__ = [
    "ERRORS",
    "SPARSE_ROWS",
    "array_of",
    "numpy_type",
    "operation_label",
    "run_on_host",
    "runs_later",
    "scalar",
    "scaled",
    "static_shape",
    "to_tensor",
    "uncompiled",
]

ERRORS: tuple[type[Exception], ...] = (tf.errors.OpError,)
SPARSE_ROWS: SparseRows = indexed_slices


def run_on_host(
    function: Callable[..., Arrays],
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[Any],
    types: Sequence[Any] | None = None,
) -> list[tf.Tensor]:
    """Run a NumPy function on tensors, immediately or as an operation of the current graph.

    ``hvdtrain.frameworks.interface.Framework.run_on_host`` describes the arguments.
    """
    kinds = [tensor.dtype for tensor in tensors] if types is None else map(tf.as_dtype, types)
    dtypes = [dtype for dtype, _ in zip(kinds, shapes)]

    def host(*arrays: np.ndarray) -> list[np.ndarray]:
        results = function(*arrays)
        return [np.asarray(result, kind.as_numpy_dtype) for result, kind in zip(results, dtypes)]

    if tf.executing_eagerly():
        with raise_as_in_tensorflow():
            return list(map(tf.convert_to_tensor, host(*map(array_of, tensors))))
    replace_session_methods(_ordered_session_methods)
    complete_functions(put_in_order)
    results = tf.numpy_function(host, tensors, dtypes, name=MARK)
    if not shapes:
        return []  # TensorFlow returns the operation
    for tensor, shape in zip(results, shapes):
        tensor.set_shape(shape)
    return list(results)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged, because it may be traced."""
    return function


def runs_later() -> bool:
    """Return whether operations are added to a graph, which runs some of them in parallel."""
    return not tf.executing_eagerly()


def array_of(tensor: tf.Tensor) -> np.ndarray:
    """Return the values of an eager tensor as a NumPy array, without a copy if possible."""
    if tensor.dtype == tf.bfloat16 and not tensor.shape.rank:
        # TensorFlow 2.21 can't convert a scalar of this type.
        return np.asarray(tf.reshape(tensor, [1])).reshape(())
    return np.asarray(tensor)


def to_tensor(value: Any) -> tf.Tensor:
    """Return a number, an array or a variable as a tensor."""
    return tf.convert_to_tensor(value)


def scalar(value: Any, like: tf.Tensor) -> tf.Tensor:
    """Return a number or a scalar tensor as a tensor with the type of ``like``."""
    return tf.cast(value, like.dtype)


def scaled(gradient: Any, factor: Any) -> Any:
    """Multiply a gradient by a scalar. Sparse gradients stay sparse.

    A factor of 0 gives zeros, even for NaN and infinity. Sparse gradients are not converted,
    because optimizers treat them differently.
    """
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, factor)


def numpy_type(tensor: tf.Tensor) -> np.dtype:
    """Return the NumPy type of a tensor's values."""
    return np.dtype(tensor.dtype.as_numpy_dtype)


def static_shape(tensor: tf.Tensor) -> Shape | None:
    """Return the shape of a tensor, with None for an unknown size or an unknown shape."""
    return None if tensor.shape.rank is None else tuple(tensor.shape)


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


def _ordered_session_methods(extend: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Return session methods that run collectives in order, and raise errors as in eager code."""

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
