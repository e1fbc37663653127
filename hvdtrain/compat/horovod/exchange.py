"""Reduction of tensors over all ranks in the same way as Horovod, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.compat.horovod.compression import Compression, Compressor
from hvdtrain.frameworks.interface import DeviceReductions
from hvdtrain.frameworks.tensorflow.differentiable_ops import allgather
from hvdtrain.frameworks.tensorflow.tensors import Arrays, operation_label, run_on_host
from hvdtrain.frameworks.variable_names import member_name
from hvdtrain.gradients.array_reduction import (
    TensorOp,
    by_type,
    gradient_share,
    reduce_arrays,
    scale,
)
from hvdtrain.gradients.ranks import Ranks

__all__ = ["ExchangeOptions", "exchange"]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of ``exchange``."""

    op: TensorOp = "average"  # the reduction, such as ``"average"``
    # class that converts tensors to the dtype in which they are sent
    compression: type[Compressor] = Compression.none
    prescale: float = 1.0  # factor by which the inputs are multiplied
    postscale: float = 1.0  # factor by which the results are multiplied
    # Device on which tensors are combined. "" stands for TensorFlow's default.
    device_dense: str = ""
    # Device on which ``tf.IndexedSlices`` are combined. "" stands for TensorFlow's default.
    device_sparse: str = ""


def exchange(
    tensors: Sequence[Any], how: ExchangeOptions, ranks: Ranks, name: str | None = None
) -> list[Any]:
    """Reduce tensors over all ranks, in the same way as Horovod.

    The result is differentiable. The ranks don't check that names are equal or that values are
    finite. The rows of ``tf.IndexedSlices`` are concatenated.

    Raises:
        NotImplementedError: If the options ``how`` do not support ``tf.IndexedSlices``.
    """
    results: list[Any] = list(tensors)
    dense = [n for n, entry in enumerate(tensors) if not isinstance(entry, tf.IndexedSlices)]
    if dense:
        with tf.device(how.device_dense or None):
            values = [tf.convert_to_tensor(tensors[n]) for n in dense]
            packed, contexts = zip(*(how.compression.compress(value) for value in values))
            label = operation_label("allreduce", name, values)
            reduced = _differentiable_allreduce(packed, how, ranks, label)
            for n, value, context in zip(dense, reduced, contexts):
                results[n] = how.compression.decompress(value, context)
    for n in set(range(len(tensors))) - set(dense):
        with tf.device(how.device_sparse or None):
            results[n] = _exchange_rows(tensors[n], how, ranks, name)
    return results


def _differentiable_allreduce(
    tensors: Sequence[tf.Tensor], how: ExchangeOptions, ranks: Ranks, name: str
) -> list[tf.Tensor]:
    """Reduce tensors, with the gradient of the sum of all ranks' losses."""
    gradient_name = f"gradient of {name}"

    def on_host(*arrays: np.ndarray) -> Arrays:
        factors = {"prescale": how.prescale, "postscale": how.postscale}
        return reduce_arrays(ranks.collectives(), arrays, how.op, **factors, name=name)

    @tf.custom_gradient
    def reduced(*values: tf.Tensor) -> Any:
        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if how.op in ("sum", "average", "adasum"):
                return _differentiable_allreduce(upstream, how, ranks, gradient_name)
            factor = how.prescale * how.postscale
            return [
                run_on_host(share, [up, value], [value.shape])[0] * tf.cast(factor, value.dtype)
                for up, value in zip(upstream, values)
            ]

        def share(upstream: np.ndarray, value: np.ndarray) -> Arrays:
            scaled = scale(value, how.prescale)
            engine = ranks.collectives()
            return [gradient_share(how.op, upstream, scaled, gradient_name, engine)]

        on_devices = ranks.device_collectives()
        if on_devices is None or how.op == "adasum" or not on_devices.supports(values):
            results = run_on_host(on_host, values, [value.shape for value in values])
        else:
            results = _reduce_on_devices(on_devices, values, how, name)
        return results, backward

    return list(cast("Any", reduced(*tensors)))


def _reduce_on_devices(
    on_devices: DeviceReductions, tensors: Sequence[tf.Tensor], how: ExchangeOptions, name: str
) -> list[tf.Tensor]:
    results: list[Any] = list(tensors)
    for indices in by_type(tensors):
        scaled = [_scale(tensors[index], how.prescale) for index in indices]
        sent_as = how.compression.dtype
        reduced = on_devices.allreduce(scaled, cast(ReduceOp, how.op), name=name, sent_as=sent_as)
        for index, tensor in zip(indices, reduced):
            results[index] = _scale(tensor, how.postscale)
    return results


def _scale(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    if factor == 1.0:
        return tensor
    wide = tensor.dtype if tensor.dtype.size > 2 else tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _exchange_rows(
    slices: tf.IndexedSlices, how: ExchangeOptions, ranks: Ranks, name: str | None
) -> tf.IndexedSlices:
    if how.op not in ("sum", "average"):
        raise NotImplementedError(
            "tf.IndexedSlices support op=Sum and op=Average, got "
            f"op={how.op.capitalize()}; convert them with tf.convert_to_tensor."
        )
    factors = how.prescale, how.postscale
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices don't support prescale_factor and postscale_factor, got "
            f"{factors}; multiply their values instead."
        )

    def gathered(tensor: tf.Tensor, part: str) -> tf.Tensor:
        label = operation_label("allgather", member_name(name, part), [tensor])
        return allgather(ranks.collectives, tensor, label)

    values, indices = gathered(slices.values, "values"), gathered(slices.indices, "indices")
    if how.op == "average":
        values /= tf.cast(ranks.collectives().size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
