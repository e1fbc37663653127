"""Means of weighted gradients where some ranks were lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

__all__ = ["scale_without_lost", "without_lost"]


def without_lost(
    averages: Sequence[np.ndarray], mean_weight: float, dtype: tf.DType
) -> list[np.ndarray]:
    """Make means of weighted gradients those over the ranks that had a part in them."""
    scale = scale_without_lost(mean_weight, dtype)
    if scale == 1.0:
        return list(averages)
    return [average * average.dtype.type(scale) for average in averages]


def scale_without_lost(mean_weight: float, dtype: tf.DType) -> float:
    """Return the factor from a mean of weighted gradients to one over the ranks with a part in it.

    Rounding alone is not made up for: it would change what no rank was missing from.
    """
    epsilon = 2.0**-7 if dtype == tf.bfloat16 else float(np.finfo(dtype.as_numpy_dtype).eps)
    if mean_weight <= 0 or abs(mean_weight - 1.0) <= 8 * epsilon:
        return 1.0
    return 1.0 / mean_weight
