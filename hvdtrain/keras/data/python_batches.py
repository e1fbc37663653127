"""Batches that Python code of the user's makes, on their way into a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras.data import batch_structure
from hvdtrain.keras.data.dataset_options import untuned
from hvdtrain.keras.data.sharded_input import JOINT_ROWS_UNKNOWN
from hvdtrain.private_api import keras as private_keras

__all__ = ["EXAMINED_BATCHES", "signature_of", "standardize", "to_dataset"]

EXAMINED_BATCHES = 2
"""The number of batches that Keras looks at to learn types and shapes."""


def standardize(batch: Any, class_weight: Any, maker: str) -> tuple[Any, ...]:
    """A user's batch as (x,), (x, y) or (x, y, sample_weight).

    ``maker`` is the name of the code that made it, for the error.

    Raises:
        ValueError: It is none of what Keras takes.
    """
    if not isinstance(batch, (dict, np.ndarray, tuple, list)) or len(batch) not in (
        (1, 2, 3) if isinstance(batch, (tuple, list)) else (len(batch),)
    ):
        raise ValueError(
            f"{maker} must return a dict, an array, or a tuple (inputs,), (inputs, targets) or "
            f"(inputs, targets, sample_weights). Received: {str(batch)[:100]} of type "
            f"{type(batch).__name__}"
        )
    packed = batch_structure.as_tuple(batch)
    if class_weight is not None and len(packed) > 1:
        if len(packed) == 3:
            raise ValueError("class_weight and sample_weight can't be used at the same time.")
        packed += (private_keras.sample_weights_of_classes(packed[1], class_weight),)
    packed = keras.tree.map_structure(private_keras.without_scipy, packed)
    return keras.tree.lists_to_tuples(packed)


def signature_of(example: tuple[Any, ...], specs: Sequence[tf.TypeSpec]) -> dict[str, Any]:
    """Return the structure of batches, for ranks to compare; ``specs`` are those of all leaves."""
    return batch_structure.signature(batch_structure.refill(example, specs))


def to_dataset(
    elements: Callable[[], Iterator[tuple[Any, ...]]],
    example: tuple[Any, ...],
    specs: Sequence[tf.TypeSpec],
    steps: int | None,
) -> tf.data.Dataset:
    """Elements (batch, rows, joint_rows), not prefetched.

    Args:
        elements: Yields the present leaves of a batch and its rows, step by step.
        example: A batch, for its structure.
        specs: Shape and dtype of each leaf of a batch.
        steps: How many there are, where that is known.
    """

    @tf.autograph.experimental.do_not_convert
    def pack(*element: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
        *leaves, rows = element
        unknown = tf.constant(JOINT_ROWS_UNKNOWN, tf.int32)
        return batch_structure.refill(example, leaves), rows, unknown

    with tf.device("CPU:0"):
        signature = (*specs, tf.TensorSpec([], tf.int32))
        dataset = tf.data.Dataset.from_generator(elements, output_signature=signature)
        dataset = dataset.map(pack)
        if steps is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        return untuned(dataset)
