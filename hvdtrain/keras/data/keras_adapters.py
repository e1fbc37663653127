"""The one place that reaches into Keras' private data adapters.

What a user may pass to ``fit`` is defined by what Keras accepts: arrays of many libraries, nested,
with None in places, cast to floatx. Using Keras' own conversions keeps it the same here.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils, tf_dataset_adapter
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)

from hvdtrain.errors import DataError

__all__ = [
    "are_arrays",
    "class_weight_map",
    "column",
    "default_batch_size",
    "gather",
    "is_tf_dataset",
    "pack_arrays",
    "refuse_extra",
    "sample_weights_of_classes",
    "specs_of_batches",
    "without_scipy",
]

is_tf_dataset = data_adapters.is_tf_dataset
sample_weights_of_classes = data_adapter_utils.class_weight_to_sample_weights


def are_arrays(*structures: Any) -> bool:
    """Whether Keras would treat these (nested, None allowed) as arrays held in memory."""
    return bool(can_convert_arrays(structures)) and any(
        leaf is not None for leaf in keras.tree.flatten(structures)
    )


def refuse_extra(kind: str, y: Any, sample_weight: Any) -> None:
    """Raise Keras' error if targets or weights stand beside an input that holds them itself."""
    if y is not None:
        data_adapters.raise_unsupported_arg("y", "the targets", kind)
    if sample_weight is not None:
        data_adapters.raise_unsupported_arg("sample_weights", "the sample weights", kind)


def default_batch_size(rows: int, steps: int | None, size: int) -> int:
    """Keras' choice where the user gave no batch size, per rank: 32, or to fit ``steps``."""
    return max(1, math.ceil(rows / (steps * size))) if steps else 32


def pack_arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> tuple[Any, int]:
    """Check arrays as Keras does and turn class weights into sample weights.

    Returns:
        The tuple (x,), (x, y) or (x, y, sample_weight), lists made tuples; and the rows.

    Raises:
        ValueError: From Keras: different lengths, or weights that don't fit the targets.
    """
    if y is None and class_weight is not None:
        raise DataError("class_weight was given without targets: pass y, or leave it out.")
    adapter = ArrayDataAdapter(
        x, y, sample_weight=sample_weight, class_weight=class_weight, batch_size=1
    )
    packed = data_adapter_utils.unpack_x_y_sample_weight(adapter._inputs)
    kept = packed[: 3 if packed[2] is not None else 2 if packed[1] is not None else 1]
    return keras.tree.lists_to_tuples(tuple(kept)), int(adapter._num_samples)


def column(array: Any) -> Any:
    """One array as something that ``gather`` takes: cast to floatx, as tensors on the host."""
    converted = array_slicing.convert_to_sliceable(array, target_backend="tensorflow")
    if isinstance(converted, array_slicing.TensorflowSparseWrapper):
        return converted
    if data_adapter_utils.is_tensorflow_tensor(converted):
        return converted
    return tf.convert_to_tensor(converted)


def gather(column: Any, indices: Any) -> Any:
    """Rows of a ``column``, in the order of ``indices``; works inside a graph."""
    if isinstance(column, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(column, indices)
    return tf.gather(column, indices, axis=0)


def class_weight_map(class_weight: Any) -> Any:
    """A function from (x, y) to (x, y, sample_weight) for use inside ``Dataset.map``."""
    return tf_dataset_adapter.make_class_weight_map_fn(class_weight)


def specs_of_batches(batches: list[Any]) -> list[tf.TypeSpec]:
    """What several flat batches (lists of arrays) have in common, entry by entry."""
    merged = data_adapter_utils.get_tensor_spec([tuple(batch) for batch in batches])
    return list(merged)


def without_scipy(leaf: Any) -> Any:
    """A SciPy sparse matrix as a ``tf.SparseTensor``; anything else as it is."""
    if data_adapter_utils.is_scipy_sparse(leaf):
        return tf.sparse.reorder(data_adapter_utils.scipy_sparse_to_tf_sparse(leaf))
    return leaf
