"""Private API of Keras for arrays and pipelines of TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.private_api.keras import KERAS
from hvdtrain.private_api.keras_data import array_of_torch

try:
    from keras.src.trainers.data_adapters import (
        array_slicing,
        data_adapter_utils,
        tf_dataset_adapter,
    )

    # Returns a function from (x, y) to (x, y, sample_weight) for Dataset.map.
    class_weight_map = tf_dataset_adapter.make_class_weight_map_fn
except (ImportError, AttributeError) as error:
    raise KERAS.missing(error) from error

__all__ = ["class_weight_map", "column", "gather", "host_array", "tensor_spec"]


def column(array: Any) -> Any:
    """Convert an array of any library to floatx, so that ``gather`` can read its rows."""
    converted = array_slicing.convert_to_sliceable(array, target_backend="tensorflow")
    if isinstance(converted, array_slicing.TensorflowSparseWrapper):
        return converted
    if data_adapter_utils.is_tensorflow_tensor(converted):
        return converted
    return tf.convert_to_tensor(converted)


def gather(column: Any, indices: Any) -> Any:
    """Return the rows at ``indices`` of a result of ``column``, in this order, also in graphs."""
    if isinstance(column, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(column, indices)
    return tf.gather(column, indices, axis=0)


def tensor_spec(spec: keras.KerasTensor) -> tf.TypeSpec:
    """Convert Keras' spec of a batch to that of TensorFlow. The number of rows is unknown."""
    return data_adapter_utils.convert_to_tf_tensor_spec(spec)


def host_array(leaf: Any) -> Any:
    """Convert an array of another library to an array that TensorFlow accepts.

    Tensors of torch become NumPy arrays. Sparse arrays of SciPy and JAX become sparse tensors.
    """
    if data_adapter_utils.is_torch_tensor(leaf):
        return array_of_torch(leaf)
    if data_adapter_utils.is_scipy_sparse(leaf):
        return tf.sparse.reorder(data_adapter_utils.scipy_sparse_to_tf_sparse(leaf))
    if data_adapter_utils.is_jax_sparse(leaf):
        return data_adapter_utils.jax_sparse_to_tf_sparse(leaf)
    return leaf
