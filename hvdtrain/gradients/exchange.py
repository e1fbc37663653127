"""Tensors and rows of all ranks combined as they are, without a look at names and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.gradients.allreduce import differentiable_allreduce
from hvdtrain.gradients.options import Exchange
from hvdtrain.gradients.ranks import Ranks
from hvdtrain.tensorflow.differentiable_ops import allgather
from hvdtrain.tensorflow.variable_names import member_name, operation_label

__all__ = ["exchange"]


def exchange(
    tensors: Sequence[Any], how: Exchange, ranks: Ranks, name: str | None = None
) -> list[Any]:
    """Combine the tensors of all ranks, differentiably.

    Args:
        tensors: Tensors, variables or ``tf.IndexedSlices``, whose rows are put one after the other:
            rows that come several times add up.
        how: The way to combine them.
        ranks: Which ranks take part.
        name: Stands in errors; the same on all ranks.

    Raises:
        NotImplementedError: For ``tf.IndexedSlices`` an op other than sum and average, or factors.
    """
    results: list[Any] = list(tensors)
    dense = [n for n, entry in enumerate(tensors) if not isinstance(entry, tf.IndexedSlices)]
    if dense:
        with tf.device(how.device_dense or None):
            values = [tf.convert_to_tensor(tensors[n]) for n in dense]
            packed, contexts = zip(*(how.compression.compress(value) for value in values))
            reduced = differentiable_allreduce(
                packed,
                how.op,
                ranks,
                name=operation_label("allreduce", name, values),
                prescale=how.prescale,
                postscale=how.postscale,
            )
            for n, value, context in zip(dense, reduced, contexts):
                results[n] = how.compression.decompress(value, context)
    for n in set(range(len(tensors))) - set(dense):
        with tf.device(how.device_sparse or None):
            results[n] = _exchange_rows(tensors[n], how, ranks, name)
    return results


def _exchange_rows(
    slices: tf.IndexedSlices, how: Exchange, ranks: Ranks, name: str | None
) -> tf.IndexedSlices:
    if how.op not in ("sum", "average"):
        raise NotImplementedError(
            "tf.IndexedSlices can be combined by Sum and Average; received "
            f"op={how.op.capitalize()}. tf.convert_to_tensor makes a tensor of them."
        )
    factors = how.prescale, how.postscale
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices can't be scaled; received prescale_factor and postscale_factor "
            f"{factors}. Multiply their values yourself."
        )

    def gathered(tensor: tf.Tensor, part: str) -> tf.Tensor:
        label = operation_label("allgather", member_name(name, part), [tensor])
        return allgather(ranks.collectives, tensor, label)

    values, indices = gathered(slices.values, "values"), gathered(slices.indices, "indices")
    if how.op == "average":
        values /= tf.cast(ranks.collectives().size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
