"""Tensors of all ranks combined: on devices that are connected, otherwise by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.interface import Collectives
from hvdtrain.gradients.array_reduction import TensorOp, by_type, reduce_arrays, scale
from hvdtrain.gradients.ranks import Ranks
from hvdtrain.tensorflow.device_collectives import DeviceCollectives
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host

__all__ = ["allreduce", "differentiable_allreduce"]


def allreduce(
    tensors: Sequence[tf.Tensor],
    op: TensorOp,
    *,
    on_devices: DeviceCollectives | None,
    on_host: Callable[..., Arrays],
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    before: Callable[[], None] | None = None,
    after: Callable[[bool, np.ndarray], None] | None = None,
) -> list[tf.Tensor]:
    """Combine tensors over all ranks; the one place that chooses between devices and host.

    Args:
        tensors: This rank's tensors, of the same shapes and types on every rank.
        op: How they are combined.
        on_devices: Combines them where they are, if it is there and takes them.
        on_host: Combines their arrays otherwise, factors and checks included.
        name: Stands in errors.
        prescale: Multiplies what goes into devices.
        postscale: Multiplies what comes out of devices.
        before: As for ``DeviceCollectives.allreduce``.
        after: As for ``DeviceCollectives.allreduce``.
    """
    if on_devices is None or op == "adasum" or not on_devices.takes(tensors):
        return run_on_host(on_host, tensors, [tensor.shape for tensor in tensors])
    results: list[Any] = list(tensors)
    for places in by_type(tensors):
        scaled = [_scaled(tensors[place], prescale) for place in places]
        reduced = on_devices.allreduce(scaled, op, name=name, before=before, after=after)
        for place, tensor in zip(places, reduced):
            results[place] = _scaled(tensor, postscale)
    return results


def differentiable_allreduce(
    tensors: Sequence[tf.Tensor],
    op: TensorOp,
    ranks: Ranks,
    *,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[tf.Tensor]:
    """``allreduce`` with the gradient of the sum of all ranks' losses, as Horovod gives it.

    Args:
        tensors: This rank's tensors, of the same shapes and types on every rank.
        op: How they are combined.
        ranks: Which ranks take part.
        name: Stands in errors.
        prescale: Multiplies what goes in.
        postscale: Multiplies what comes out.
    """
    of = f"gradient of {name}"

    def on_host(*arrays: np.ndarray) -> Arrays:
        collectives = ranks.collectives()
        return reduce_arrays(
            collectives, arrays, op, prescale=prescale, postscale=postscale, name=name
        )

    @tf.custom_gradient
    def reduced(*values: tf.Tensor) -> Any:
        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op in ("sum", "average", "adasum"):
                return differentiable_allreduce(
                    upstream, op, ranks, name=of, prescale=prescale, postscale=postscale
                )
            factor = prescale * postscale
            return [
                run_on_host(share, [up, value], [value.shape])[0] * tf.cast(factor, value.dtype)
                for up, value in zip(upstream, values)
            ]

        def share(upstream: np.ndarray, value: np.ndarray) -> Arrays:
            return [_share_of(op, upstream, scale(value, prescale), of, ranks.collectives())]

        results = allreduce(
            values,
            op,
            on_devices=ranks.device_collectives(),
            on_host=on_host,
            name=name,
            prescale=prescale,
            postscale=postscale,
        )
        return results, backward

    return list(cast("Any", reduced(*tensors)))


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """``scale`` of a tensor where it is."""
    if factor == 1.0:
        return tensor
    wide = tensor.dtype if tensor.dtype.size > 2 else tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _share_of(
    op: TensorOp, upstream: np.ndarray, value: np.ndarray, name: str, collectives: Collectives
) -> np.ndarray:
    """What this rank's value has to do with a minimum, maximum or product, times ``upstream``.

    Ranks whose values are alike share what a minimum or maximum is worth.

    Args:
        op: One of min, max and product.
        upstream: The gradient of the result; that of all ranks counts.
        value: What went in, after scaling.
        name: Stands in errors.
        collectives: The engine of the operation.
    """
    total = collectives.allreduce(upstream, "sum", name=name)
    every = collectives.allgather(value[np.newaxis], name=name)
    if op == "product":
        others = np.delete(every, collectives.rank, axis=0)
        return np.asarray(total * np.prod(others, axis=0), value.dtype)
    best = every.min(axis=0) if op == "min" else every.max(axis=0)
    chosen = (every == best).astype(value.dtype)
    return np.asarray(total * chosen[collectives.rank] / chosen.sum(axis=0), value.dtype)
