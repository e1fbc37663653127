"""Batches that Python code of the user's makes, on their way into a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras.data import batch_structure
from hvdtrain.keras.data.dataset_options import untuned
from hvdtrain.keras.data.sharded_input import Share
from hvdtrain.private_api import keras as private_keras

__all__ = ["EXAMINED_BATCHES", "signature_of", "standardize", "to_dataset"]

EXAMINED_BATCHES = 2
"""The number of batches that Keras looks at to learn types and shapes."""


def standardize(batch: Any, class_weight: Any, maker: str, most_parts: int | None = None) -> Any:
    """Return a user's batch as Keras passes it to a step: a dict or a tuple, without lists.

    Args:
        batch: From the user's code.
        class_weight: From ``fit``.
        maker: The name of the code, for the error.
        most_parts: The largest number of parts that Keras takes from it.

    Raises:
        ValueError: The batch is of another kind.
    """
    batch = keras.tree.map_structure(private_keras.host_array, batch)
    if hasattr(batch, "dtype"):
        batch = (batch,)
    parts = len(batch) if isinstance(batch, (tuple, list)) else 1
    if not isinstance(batch, (dict, tuple, list)) or not 0 < parts <= (most_parts or parts):
        raise ValueError(
            f"{maker} must make a dict, an array, or a tuple (inputs,), (inputs, targets) or "
            f"(inputs, targets, sample_weights), got {str(batch)[:100]} of type "
            f"{type(batch).__name__}; make one of these."
        )
    if class_weight is not None and parts > 1:
        if parts > 2:
            raise ValueError("class_weight and sample_weight can't be used at the same time.")
        batch = (*batch, private_keras.sample_weights_of_classes(batch[1], class_weight))
    return keras.tree.lists_to_tuples(batch)


def signature_of(example: Any, specs: Sequence[tf.TypeSpec]) -> dict[str, Any]:
    """Return the structure of batches, for ranks to compare; ``specs`` are those of all leaves."""
    return batch_structure.signature(batch_structure.refill(example, specs))


def to_dataset(
    elements: Callable[[], Iterator[tuple[Any, ...]]],
    example: Any,
    specs: Sequence[tf.TypeSpec],
    steps: int | None,
) -> tf.data.Dataset:
    """Make a dataset of shares, not prefetched.

    Args:
        elements: Yields the present leaves of a batch, rows and joint_rows, step by step.
        example: A batch, for its structure.
        specs: Shape and dtype of each leaf of a batch.
        steps: How many there are, where that is known.
    """

    @tf.autograph.experimental.do_not_convert
    def pack(*element: Any) -> Share:
        *leaves, rows, joint_rows = element
        return Share(batch_structure.refill(example, leaves), rows, joint_rows)

    with tf.device("CPU:0"):
        signature = (*specs, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32))
        dataset = tf.data.Dataset.from_generator(elements, output_signature=signature)
        dataset = dataset.map(pack)
        if steps is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        return untuned(dataset)
