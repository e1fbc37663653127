"""Ragged predictions of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

__all__ = ["join_ragged"]


def join_ragged(
    own: tf.RaggedTensor,
    kept: np.ndarray,
    order: np.ndarray | None,
    gather: Callable[[np.ndarray, str], np.ndarray],
) -> tf.RaggedTensor:
    """Return the predictions of all ranks, in the order of the input.

    Args:
        own: This rank's predictions.
        kept: For each row of ``own``, whether it counts.
        order: The indices of the rows in the order of the input. None if the ranks' parts are in
            this order already.
        gather: Function that concatenates an array of each rank. Its second argument is a name.
    """
    own = tf.ragged.boolean_mask(own, kept)
    # The joint tensor has the values and row lengths of all parts in rank order.
    values = gather(own.flat_values.numpy(), "ragged predictions")
    lengths = [
        gather(level.numpy(), "row lengths of predictions") for level in own.nested_row_lengths()
    ]
    joint = tf.RaggedTensor.from_nested_row_lengths(values, lengths)
    return joint if order is None else tf.gather(joint, order)
