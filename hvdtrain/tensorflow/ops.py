"""Collectives as differentiable TensorFlow operations; they run outside XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collectives

__all__ = ["stack_ranks"]


def stack_ranks(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The tensors of all ranks, stacked along a new first axis in rank order.

    Args:
        collectives: The engine.
        tensor: Same shape and type on every rank.
        name: For errors.

    Returns:
        A tensor of shape ``(size, *tensor.shape)``. Its gradient is the sum over all ranks of
        what arrives for this rank's part, so that a loss averaged over the ranks is
        differentiated as one function of all their inputs.
    """

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


def _call(function: Callable[[np.ndarray], np.ndarray], value: tf.Tensor, shape: Any) -> tf.Tensor:
    result = tf.numpy_function(function, [value], value.dtype)
    result.set_shape(shape)
    return result
