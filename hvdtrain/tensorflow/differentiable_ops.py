"""Collectives as differentiable TensorFlow operations; they run outside XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.interface import Collectives
from hvdtrain.tensorflow.numpy_op import run_between_ranks

__all__ = ["stack_ranks"]


def stack_ranks(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The tensors of all ranks, stacked along a new first axis in rank order.

    Args:
        collectives: The engine.
        tensor: Same shape and type on every rank.
        name: For errors.

    Returns:
        A tensor of shape ``(size, *tensor.shape)``; in an elastic job the first dimension is not
        known before, as ranks may be lost. Its gradient is the sum over all ranks of what arrives
        for this rank's part, so that a loss averaged over the ranks is differentiated as one
        function of all their inputs.
    """
    if collectives.survives_losses:
        return _stack_survivors(collectives, tensor, name)

    @tf.custom_gradient
    def stacked(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gather(array: np.ndarray) -> np.ndarray:
            return collectives.allgather(array[np.newaxis], name=name)

        result = _call(gather, value, [collectives.size, *value.shape])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            def scatter(array: np.ndarray) -> np.ndarray:
                return collectives.reduce_scatter(array, "sum", name=f"gradient of {name}")[0]

            return _call(scatter, upstream, value.shape)

        return result, gradient

    return stacked(tensor)


def _stack_survivors(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The same where ranks may be lost between the two passes.

    The gradient has a row for each rank that gave its part to the forward pass; among those this
    rank finds its own row, whatever its number has become since.
    """

    @tf.custom_gradient
    def stacked(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gather(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows = collectives.allgather(array[np.newaxis], name=name)
            me = collectives.members[collectives.rank]
            return rows, np.array(collectives.contributed.index(me), np.int32)

        result, row = run_between_ranks(gather, [value], [value.dtype, tf.int32])
        result.set_shape([None, *value.shape])
        row.set_shape([])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            def add(array: np.ndarray) -> np.ndarray:
                return collectives.allreduce(array, "sum", name=f"gradient of {name}")

            return _call(add, upstream, [None, *value.shape])[row]

        return result, gradient

    return stacked(tensor)


def _call(function: Callable[[np.ndarray], np.ndarray], value: tf.Tensor, shape: Any) -> tf.Tensor:
    result = run_between_ranks(function, [value], value.dtype)
    result.set_shape(shape)
    return result
