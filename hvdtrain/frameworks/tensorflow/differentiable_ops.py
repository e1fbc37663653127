"""Differentiable TensorFlow operations that call collectives. XLA can't compile them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.frameworks.tensorflow.tensors import Arrays, run_on_host

__all__ = ["allgather", "any_rows", "differentiable", "stack_ranks"]

# A result and its gradient function, for tf.custom_gradient.
_Differentiable = tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]


def differentiable(
    forward: Callable[[np.ndarray], np.ndarray],
    backward: Callable[[np.ndarray], np.ndarray],
    tensor: tf.Tensor,
    shape: Any,
) -> tf.Tensor:
    """Call a NumPy function on a tensor, and define its gradient with a second NumPy function.

    Args:
        forward: Function that takes the tensor and returns a result of the same type.
        backward: Function that takes the gradient of the result and returns the gradient of the
            tensor.
        tensor: Argument of ``forward``.
        shape: Static shape of the result.
    """

    @tf.custom_gradient
    def run(value: tf.Tensor) -> _Differentiable:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return run_on_host(lambda array: [backward(array)], [upstream], [value.shape])[0]

        return run_on_host(lambda array: [forward(array)], [value], [shape])[0], gradient

    return run(tensor)


def allgather(engine: Callable[[], Engine], tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first axis.

    Gradients are computed for the mean of all ranks' losses.

    Only the first dimension may differ between ranks. ``engine`` returns the current engine, which
    may change between steps.
    """

    @tf.custom_gradient
    def gathered(value: tf.Tensor) -> _Differentiable:
        def gather(array: np.ndarray) -> Arrays:
            return [engine().allgather(array, name=name)]

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            rows = tf.shape(value, tf.int64)[0]
            return run_on_host(own_rows, [upstream, rows], [value.shape])[0]

        def own_rows(upstream: np.ndarray, rows: np.ndarray) -> Arrays:
            collectives, label = engine(), f"gradient of {name}"
            mean = collectives.allreduce(upstream, "average", name=label)
            counts = collectives.allgather(np.reshape(rows, 1), name=label)
            start = int(counts[: collectives.rank].sum())
            return [mean[start : start + int(rows)]]

        (result,) = run_on_host(gather, [value], [any_rows(value)])
        return result, backward

    return gathered(tensor)


def stack_ranks(collectives: Engine, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Stack the tensors of all ranks; see ``hvdtrain.frameworks.stack_ranks``.

    In an elastic job, the first dimension of the result's static shape is None.
    """
    if collectives.survives_losses:
        return _stack_survivors(collectives, tensor, name)

    def gather(array: np.ndarray) -> np.ndarray:
        return collectives.allgather(array[np.newaxis], name=name)

    def scatter(array: np.ndarray) -> np.ndarray:
        return collectives.reduce_scatter(array, "sum", name=f"gradient of {name}")[0]

    return differentiable(gather, scatter, tensor, [collectives.size, *tensor.shape])


def _stack_survivors(collectives: Engine, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Stack the tensors of all ranks in an elastic job, where ranks may be lost.

    Ranks may be lost between the forward pass and the backward pass. The gradient has a row for
    each rank of the forward pass. This rank may get a different number, so the index of its row is
    stored.
    """

    @tf.custom_gradient
    def stacked(value: tf.Tensor) -> _Differentiable:
        shape = [None, *value.shape]

        def gather(array: np.ndarray) -> Arrays:
            rows = collectives.allgather(array[np.newaxis], name=name)
            member = collectives.members[collectives.rank]
            return [rows, np.array(collectives.contributed.index(member), np.int32)]

        result, row = run_on_host(gather, [value], [shape, []], [value.dtype, tf.int32])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return run_on_host(add, [upstream], [shape])[0][row]

        def add(array: np.ndarray) -> Arrays:
            return [collectives.allreduce(array, "sum", name=f"gradient of {name}")]

        return result, gradient

    return stacked(tensor)


def any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    """Return the static shape of a tensor, with None as its first dimension."""
    if tensor.shape.rank is None:
        return tensor.shape
    return tf.TensorShape([None, *tensor.shape[1:]])
