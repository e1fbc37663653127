"""``BatchNormalization(synchronized=True)`` with the batches of all ranks.

Keras itself synchronizes this layer only between the replicas of a tf.distribute strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.frameworks import stack_ranks
from hvdtrain.frameworks.variable_names import without_counts
from hvdtrain.private_api.keras import (
    flatten_layers,
    reduction_axes,
    replace_moments,
    set_untracked,
)
from hvdtrain.trainer.loss_weights import ratio

__all__ = ["SyncBatchNormalization", "synchronize_batch_normalization", "synchronized_layers"]


@keras.saving.register_keras_serializable("hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the mean and variance over the batches of all ranks.

    Horovod has a layer of this name. In models that are passed to ``hvdtrain.distribute``,
    ``keras.layers.BatchNormalization(synchronized=True)`` computes the same, and is saved as a
    plain Keras layer. But Keras accepts ``synchronized=True`` only with its TensorFlow backend.

    Args:
        fused: Must be False.
        **kwargs: The arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: If ``fused`` is not False.
    """

    hvdtrain_is_distributed = False

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(
                f"Received fused={fused!r}, expected False: a fused kernel can't combine the "
                "moments of all ranks."
            )
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        own = super()._moments(inputs, mask)
        collectives = world.collectives()
        # In a model that is passed to distribute, the caller combines the moments.
        if collectives.size == 1 or self.hvdtrain_is_distributed:
            return own
        return _joint_moments(self, own, _count(self, inputs, mask, own[0].dtype), collectives)


def synchronized_layers(model: keras.Model) -> list[Any]:
    """Return the layers of ``model`` that normalize over the batches of all ranks."""
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, SyncBatchNormalization)
        or (isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized)
    ]


def synchronize_batch_normalization(
    layer: Any,
    collectives: Engine,
    rows: Callable[[], Any],
    weight: Callable[[], Any] = lambda: None,
) -> None:
    """Make a ``BatchNormalization`` layer use the mean and variance over the batches of all ranks.

    Each rank sends the count, mean and variance of its batch. They are combined as in Chan, Golub
    and LeVeque (1979). If rank r has n_r values with mean m_r and variance v_r, and n is the sum of
    all n_r, then the mean over all ranks is m = sum(n_r m_r) / n, and the variance over all ranks
    is sum(n_r (v_r + (m_r - m)^2)) / n.

    Args:
        layer: The layer.
        collectives: The connection between the ranks.
        rows: During a training step, returns how many rows of this rank's batch count. Otherwise it
            returns None.
        weight: Returns the factor w_r by which this rank's gradients are multiplied after the
            backward pass, or None if the loss itself is multiplied. The loss of rank s depends on
            the values of rank r. The gradient of this dependency must be multiplied by w_s, and not
            by w_r.
    """

    def synchronize(local_moments: Callable[..., Any]) -> Callable[..., Any]:
        def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
            synchronized, layer.synchronized = layer.synchronized, False
            try:
                own = local_moments(inputs, mask)
            finally:
                layer.synchronized = synchronized
            count = _count(layer, inputs, mask, own[0].dtype)
            step_rows = rows()
            counts = None if step_rows is None else step_rows > 0
            return _joint_moments(layer, own, count, collectives, counts, weight())

        return moments

    set_untracked(layer, "hvdtrain_is_distributed", True)
    replace_moments(layer, synchronize)


def _joint_moments(
    layer: Any,
    own: tuple[Any, Any],
    count: Any,
    collectives: Engine,
    counts: Any = None,
    weight: Any = None,
) -> tuple[Any, Any]:
    """Combine the means and variances of all ranks.

    ``own`` contains the mean and the variance of this rank's ``count`` values. If ``counts`` is
    False, this rank's batch is ignored: other ranks receive neither its mean and variance nor the
    gradients of this mean and variance. ``weight`` is a result of the function of this name in
    ``synchronize_batch_normalization``.
    """
    mean, variance = own
    elastic = collectives.survives_losses
    divide = ops.divide_no_nan if elastic else ops.divide
    shape = tuple(mean.shape)
    channels = math.prod(shape)
    packed = ops.concatenate(
        [ops.reshape(count, [1]), ops.reshape(mean, [channels]), ops.reshape(variance, [channels])]
    )
    if counts is not None:
        packed = ops.where(counts, packed, ops.zeros_like(packed))
    if weight is not None:
        packed = _scale_gradient(packed, ratio(1.0, weight))
    stacked = stack_ranks(collectives, packed, f"moments of {without_counts(layer.path)}")
    if weight is not None:
        stacked = _scale_gradient(stacked, weight)
    if counts is not None:
        stacked = ops.where(counts, stacked, ops.stop_gradient(stacked))
    n = stacked[:, :1]
    means, variances = stacked[:, 1 : 1 + channels], stacked[:, 1 + channels :]
    total = ops.sum(n)
    joint_mean = divide(ops.sum(n * means, axis=0), total)
    deviations = variances + (means - joint_mean) ** 2
    joint_variance = divide(ops.sum(n * deviations, axis=0), total)
    mean, variance = ops.reshape(joint_mean, shape), ops.reshape(joint_variance, shape)
    if not elastic:
        return mean, variance
    # If all ranks with rows are lost in this step, the moving moments don't change.
    return (
        ops.where(total > 0, mean, ops.cast(layer.moving_mean, mean.dtype)),
        ops.where(total > 0, variance, ops.cast(layer.moving_variance, variance.dtype)),
    )


def _scale_gradient(values: Any, factor: Any) -> Any:
    """Return the same values. In the backward pass, multiply their gradient by ``factor``."""
    constant = ops.stop_gradient(values)
    return constant + ops.cast(factor, values.dtype) * (values - constant)


def _count(layer: Any, inputs: Any, mask: Any, dtype: Any) -> Any:
    """Return how many values of this rank's batch the layer uses to compute each mean."""
    if mask is not None:
        return ops.sum(ops.cast(mask, dtype))
    sizes = [ops.shape(inputs)[axis] for axis in reduction_axes(layer)]
    return ops.cast(ops.prod(ops.stack(sizes)), dtype)
