"""Functions for the sparse gradients of TensorFlow.

This module is the ``SPARSE_ROWS`` of ``hvdtrain.frameworks.interface``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["add_duplicates", "is_sparse", "join", "split"]


def is_sparse(gradient: Any) -> bool:
    """Return whether a gradient is ``tf.IndexedSlices``."""
    return isinstance(gradient, tf.IndexedSlices)


def add_duplicates(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up the rows that have the same index."""
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def split(gradient: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows of a sparse gradient, and their indices."""
    return gradient.values, gradient.indices


def join(rows: tf.Tensor, indices: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return a sparse gradient of the same variable as the gradient ``like``."""
    return tf.IndexedSlices(rows, indices, like.dense_shape)
