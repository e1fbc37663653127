"""Sparse gradients: scaled, and their rows as bytes.

One operation moves all that belongs together: with two, a rank might be lost between them, and its
indices be missing from its values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["pack_rows", "scaled", "unpack_rows"]

# The index of no row: it stands before the weight of the rank whose rows these are.
_WEIGHT = -1


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiply a gradient by a scalar: by 0 to zeros, even if it is not finite.

    A sparse one stays sparse, as optimizers treat it otherwise.
    """
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, factor)


def pack_rows(values: np.ndarray, indices: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """This rank's rows, their indices, and what the rank counts for.

    Args:
        values: The rows, of shape (n, ...).
        indices: Integers, of shape (n,).
        weight: A scalar of the values' type.

    Returns:
        Bytes, uint8 of shape (n + 1, m).
    """
    width = math.prod(values.shape[1:])
    table = np.empty((len(values) + 1, width), values.dtype)
    table[:-1] = values.reshape(len(values), width)
    table[-1] = weight
    places = np.append(indices, np.array(_WEIGHT, indices.dtype)).astype(indices.dtype)
    return np.concatenate([_bytes(table), _bytes(places[:, np.newaxis])], axis=1)


def unpack_rows(
    joined: np.ndarray, values: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unpack what several ranks packed, one after another.

    Args:
        joined: Bytes of shape (rows, m).
        values: As this rank packed them, for type and shape.
        indices: As this rank packed them, for the type.

    Returns:
        The values of all ranks, their indices, and the weight of each rank.
    """
    item = indices.dtype.itemsize
    places = np.ascontiguousarray(joined[:, -item:]).view(indices.dtype)[:, 0]
    width = math.prod(values.shape[1:])
    table = np.ascontiguousarray(joined[:, :-item]).view(values.dtype).reshape(-1, width)
    marks = places == _WEIGHT
    rows = table[~marks].reshape(-1, *values.shape[1:])
    return rows, places[~marks], table[marks][:, 0].astype(np.float64)


def _bytes(table: np.ndarray) -> np.ndarray:
    """Each row's bytes."""
    return table.view(np.uint8).reshape(len(table), -1)
