"""Collectives as differentiable TensorFlow operations; they run outside XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host

__all__ = ["allgather", "any_rows", "differentiable", "stack_ranks"]

_Differentiable = tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]
"""A result and its gradient, as ``tf.custom_gradient`` takes them."""


def differentiable(
    forward: Callable[[np.ndarray], np.ndarray],
    backward: Callable[[np.ndarray], np.ndarray],
    tensor: tf.Tensor,
    shape: Any,
) -> tf.Tensor:
    """Run NumPy code on a tensor, and on the gradient of the result for that of the tensor.

    Args:
        forward: Takes the tensor's array to the result, of the same type.
        backward: Takes the gradient of the result to that of the tensor.
        tensor: What goes in.
        shape: What is known of the shape of the result.
    """

    @tf.custom_gradient
    def run(value: tf.Tensor) -> _Differentiable:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return run_on_host(lambda array: [backward(array)], [upstream], [value.shape])[0]

        return run_on_host(lambda array: [forward(array)], [value], [shape])[0], gradient

    return run(tensor)


def allgather(engine: Callable[[], Engine], tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The tensors of all ranks, one after the other, along the first axis.

    Args:
        engine: Gives the engine of the moment, which may be another at each step.
        tensor: This rank's tensor; only the first dimension may differ between ranks.
        name: Stands in errors.

    Returns:
        A tensor whose gradient is that of the mean of all ranks' losses.
    """

    @tf.custom_gradient
    def gathered(value: tf.Tensor) -> _Differentiable:
        def gather(array: np.ndarray) -> Arrays:
            return [engine().allgather(array, name=name)]

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            rows = tf.shape(value, tf.int64)[0]
            return run_on_host(own_part, [upstream, rows], [value.shape])[0]

        def own_part(upstream: np.ndarray, rows: np.ndarray) -> Arrays:
            collectives, of = engine(), f"gradient of {name}"
            mean = collectives.allreduce(upstream, "average", name=of)
            counts = collectives.allgather(np.reshape(rows, 1), name=of)
            start = int(counts[: collectives.rank].sum())
            return [mean[start : start + int(rows)]]

        (result,) = run_on_host(gather, [value], [any_rows(value)])
        return result, backward

    return gathered(tensor)


def stack_ranks(collectives: Engine, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The tensors of all ranks, stacked along a new first axis in rank order.

    Args:
        collectives: The engine.
        tensor: This rank's tensor, of the same shape and type on every rank.
        name: Stands in errors.

    Returns:
        A tensor of shape ``(size, *tensor.shape)``; in an elastic job the first dimension is not
        known before, as ranks may be lost. Its gradient is the sum over all ranks of what arrives
        for this rank's part, so that a loss averaged over the ranks is differentiated as one
        function of all their inputs.
    """
    if collectives.survives_losses:
        return _stack_survivors(collectives, tensor, name)

    def gather(array: np.ndarray) -> np.ndarray:
        return collectives.allgather(array[np.newaxis], name=name)

    def scatter(array: np.ndarray) -> np.ndarray:
        return collectives.reduce_scatter(array, "sum", name=f"gradient of {name}")[0]

    return differentiable(gather, scatter, tensor, [collectives.size, *tensor.shape])


def _stack_survivors(collectives: Engine, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Stack the tensors of all ranks where some may be lost between the two passes.

    The gradient has a row for each rank that gave its part to the forward pass; among those this
    rank finds its own row, whatever its number has become since.
    """

    @tf.custom_gradient
    def stacked(value: tf.Tensor) -> _Differentiable:
        shape = [None, *value.shape]

        def gather(array: np.ndarray) -> Arrays:
            rows = collectives.allgather(array[np.newaxis], name=name)
            me = collectives.members[collectives.rank]
            return [rows, np.array(collectives.contributed.index(me), np.int32)]

        result, row = run_on_host(gather, [value], [shape, []], [value.dtype, tf.int32])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return run_on_host(add, [upstream], [shape])[0][row]

        def add(array: np.ndarray) -> Arrays:
            return [collectives.allreduce(array, "sum", name=f"gradient of {name}")]

        return result, gradient

    return stacked(tensor)


def any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    """The shape of a tensor, with any first dimension."""
    if tensor.shape.rank is None:
        return tensor.shape
    return tf.TensorShape([None, *tensor.shape[1:]])
