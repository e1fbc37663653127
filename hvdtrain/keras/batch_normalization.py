"""``BatchNormalization(synchronized=True)`` that really sees the batches of all ranks.

Keras asks tf.distribute for the other replicas, which knows of none here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.private_api.keras import flatten_layers, reduction_axes, replace_moments
from hvdtrain.tensorflow.differentiable_ops import stack_ranks
from hvdtrain.tensorflow.variable_names import without_counts

__all__ = ["SyncBatchNormalization", "synchronize_batch_normalization", "synchronized_layers"]


@keras.saving.register_keras_serializable("hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``BatchNormalization`` with the moments of the batches of all ranks, by Horovod's name.

    For models whose ranks each train on data of their own. In a model that ``hvdtrain.distribute``
    gets, ``keras.layers.BatchNormalization(synchronized=True)`` does the same, and is saved as a
    layer of Keras.

    Args:
        fused: False.
        kwargs: The arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused`` is something else.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(
                f"Received fused={fused!r}; expected False: the moments of all ranks are put "
                "together in between."
            )
        super().__init__(**kwargs)

    def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        own = super()._moments(inputs, mask)
        collectives = world.collectives()
        if collectives.size == 1:
            return own
        return _joint_moments(self, own, _count(self, inputs, mask, own[0].dtype), collectives)


def synchronized_layers(model: keras.Model) -> list[Any]:
    """The layers of ``model`` that were built with ``synchronized=True``."""
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]


def synchronize_batch_normalization(
    layer: Any, collectives: Engine, rows: Callable[[], tf.Tensor | None]
) -> None:
    """Let ``layer`` normalise with the moments over the batches of all ranks.

    Ranks exchange count, mean and variance, and combine them as Chan, Golub and LeVeque (1979)
    do: with n_r, m_r, v_r of rank r, m = sum(n_r m_r) / n and v = sum(n_r (v_r + (m_r - m)^2)) / n.
    ``rows`` returns the rows that count in the current step of training, None between steps.
    """

    def synchronize(local_moments: Callable[..., Any]) -> Callable[..., Any]:
        def moments(inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
            synchronized, layer.synchronized = layer.synchronized, False
            try:
                own = local_moments(inputs, mask)
            finally:
                layer.synchronized = synchronized
            dtype = own[0].dtype
            count = _count(layer, inputs, mask, dtype)
            counted = rows()
            counts = None if counted is None else counted > 0
            return _joint_moments(layer, own, count, collectives, counts)

        return moments

    replace_moments(layer, synchronize)


def _joint_moments(
    layer: Any,
    own: tuple[tf.Tensor, tf.Tensor],
    count: tf.Tensor,
    collectives: Engine,
    counts: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over all ranks, from this rank's ``own``, which are of ``count`` values.

    Unless ``counts``, a boolean, neither these nor their gradients reach other ranks.
    """
    mean, variance = own
    elastic = collectives.survives_losses
    divide = tf.math.divide_no_nan if elastic else tf.math.divide
    shape = mean.shape
    packed = tf.concat(
        [tf.reshape(count, [1]), tf.reshape(mean, [-1]), tf.reshape(variance, [-1])], axis=0
    )
    packed.set_shape([1 + 2 * shape.num_elements()])
    if counts is not None:
        packed = tf.where(counts, packed, tf.zeros_like(packed))
    stacked = stack_ranks(collectives, packed, f"moments of {without_counts(layer.path)}")
    if counts is not None:
        stacked = tf.where(counts, stacked, tf.stop_gradient(stacked))
    channels = shape.num_elements()
    n = stacked[:, :1]
    means, variances = stacked[:, 1 : 1 + channels], stacked[:, 1 + channels :]
    total = tf.reduce_sum(n)
    joint_mean = divide(tf.reduce_sum(n * means, axis=0), total)
    joint_variance = divide(
        tf.reduce_sum(n * (variances + (means - joint_mean) ** 2), axis=0), total
    )
    joint = tf.reshape(joint_mean, shape), tf.reshape(joint_variance, shape)
    return _unless_empty(layer, total, joint) if elastic else joint


def _unless_empty(
    layer: Any, total: tf.Tensor, joint: tuple[tf.Tensor, tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the moments; without rows in the batch the moving ones, which then stay as they are.

    The ranks that had the rows of a step may be lost in it.
    """
    mean, variance = joint
    return (
        tf.where(total > 0, mean, tf.cast(layer.moving_mean, mean.dtype)),
        tf.where(total > 0, variance, tf.cast(layer.moving_variance, variance.dtype)),
    )


def _count(layer: Any, inputs: tf.Tensor, mask: Any, dtype: Any) -> tf.Tensor:
    """Count the values that each of this rank's moments is made of."""
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    sizes = [tf.shape(inputs)[axis] for axis in reduction_axes(layer)]
    return tf.cast(tf.reduce_prod(tf.stack(sizes)), dtype)
