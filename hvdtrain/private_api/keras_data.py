"""Private API of Keras for the data that ``fit``, ``evaluate`` and ``predict`` accept.

For example, ``fit`` accepts arrays from many libraries, None, and nested structures of arrays. It
casts arrays to floatx. hvdtrain uses Keras' own functions for this, so that it accepts the same
inputs.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from hvdtrain.errors import DataError
from hvdtrain.private_api.keras import KERAS

try:
    from keras.src.trainers import data_adapters
    from keras.src.trainers.data_adapters import array_slicing, data_adapter, data_adapter_utils
    from keras.src.trainers.data_adapters.array_data_adapter import (
        ArrayDataAdapter,
        can_convert_arrays,
    )

    DataAdapter: Any = data_adapter.DataAdapter
    is_grain_dataset = data_adapters.is_grain_dataset
    is_tf_dataset = data_adapters.is_tf_dataset
    is_torch_dataloader = data_adapters.is_torch_dataloader
    class_sample_weights = data_adapter_utils.class_weight_to_sample_weights
    # Splits arrays into training and validation data.
    split_validation = array_slicing.train_validation_split
except (ImportError, AttributeError) as error:
    raise KERAS.missing(error) from error

__all__ = [
    "DataAdapter",
    "are_arrays",
    "array_of_torch",
    "batch_specs",
    "check_no_targets",
    "class_sample_weights",
    "column",
    "default_batch_size",
    "dense_components",
    "gather",
    "host_array",
    "is_grain_dataset",
    "is_tf_dataset",
    "is_torch_dataloader",
    "length_of_dataloader",
    "pack_arrays",
    "split_validation",
]


def are_arrays(*structures: Any) -> bool:
    """Return whether ``fit`` would treat these values as arrays in memory.

    The values are nested structures. They may contain None, but must not consist only of None.
    """
    return bool(can_convert_arrays(structures)) and any(
        leaf is not None for leaf in keras.tree.flatten(structures)
    )


def check_no_targets(kind: str, y: Any, sample_weight: Any) -> None:
    """Raise Keras' error if targets or weights are passed with an input of this ``kind``."""
    if y is not None:
        data_adapters.raise_unsupported_arg("y", "the targets", kind)
    if sample_weight is not None:
        data_adapters.raise_unsupported_arg("sample_weights", "the sample weights", kind)


def default_batch_size(rows: int, steps: int | None, size: int) -> int:
    """Return the batch size per rank that is used if ``fit`` gets no ``batch_size``.

    The size is 32, as in Keras. If ``steps`` is given, the size is chosen so that ``steps`` batches
    on all ranks contain all rows.
    """
    return max(1, math.ceil(rows / (steps * size))) if steps else 32


def pack_arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> tuple[Any, int]:
    """Validate arrays like Keras, and convert class weights to sample weights.

    Returns:
        Two values. The first is a batch that contains all rows, with tuples instead of lists. The
        second is the number of rows.

    Raises:
        ValueError: If the arrays have different lengths, or if weights don't match the targets.
    """
    if y is None and class_weight is not None:
        raise DataError("class_weight requires targets; pass y.")
    adapter = ArrayDataAdapter(
        x, y, sample_weight=sample_weight, class_weight=class_weight, batch_size=1
    )
    inputs = keras.tree.lists_to_tuples(KERAS.get(adapter, "_inputs"))
    return inputs, int(KERAS.get(adapter, "_num_samples"))


def column(array: Any) -> Any:
    """Convert an array of any supported library so that ``gather`` can read rows from it.

    The result is cast to floatx. ``keras_tensorflow.column`` is for the TensorFlow backend.
    """
    return array_slicing.convert_to_sliceable(array, target_backend=keras.backend.backend())


def gather(column: Any, indices: np.ndarray) -> Any:
    """Return the rows at ``indices`` of a result of ``column``, in this order."""
    convert = getattr(column, f"convert_to_{keras.backend.backend()}_compatible")
    return host_array(convert(column[indices]))


def batch_specs(batches: list[Any], rows: int | None) -> list[keras.KerasTensor]:
    """Return the specs that several batches have in common. A batch is a list of arrays.

    ``rows`` is the number of rows of every batch, or None if it differs.
    """
    specs = data_adapter_utils.get_keras_tensor_spec([tuple(batch) for batch in batches])
    return [
        keras.KerasTensor(
            (rows, *spec.shape[1:]),
            spec.dtype,
            sparse=spec.sparse,
            ragged=spec.ragged,
            ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
        for spec in specs
    ]


def host_array(leaf: Any) -> Any:
    """Convert an array of any library to one that Keras' torch or JAX backend accepts.

    The result is a NumPy array or a tensor of the backend, and None for None. Ragged tensors are
    padded. Sparse arrays become dense, except on JAX, where they become sparse arrays of JAX.
    ``keras_tensorflow.host_array`` is for the TensorFlow backend.
    """
    in_jax = keras.backend.backend() == "jax"
    if data_adapter_utils.is_tensorflow_ragged(leaf):
        return leaf.to_tensor().numpy()
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        return data_adapter_utils.tf_sparse_to_jax_sparse(leaf) if in_jax else _dense(leaf)
    if data_adapter_utils.is_scipy_sparse(leaf):
        if in_jax:
            return data_adapter_utils.scipy_sparse_to_jax_sparse(leaf)
        return leaf.toarray()
    if data_adapter_utils.is_jax_sparse(leaf):
        return leaf if in_jax else np.asarray(leaf.todense())
    if data_adapter_utils.is_torch_tensor(leaf):
        return array_of_torch(leaf) if in_jax else leaf.detach()
    if in_jax and data_adapter_utils.is_jax_array(leaf):
        return leaf
    return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf


def array_of_torch(tensor: Any) -> np.ndarray:
    """Return a tensor of torch as a NumPy array."""
    tensor = tensor.detach().cpu()
    if keras.backend.standardize_dtype(tensor.dtype) == "bfloat16":
        # NumPy can't read this type from torch.
        return tensor.float().numpy().astype("bfloat16")
    return tensor.numpy()


def _dense(sparse: Any) -> np.ndarray:
    dense = np.zeros(sparse.shape, sparse.dtype.as_numpy_dtype)
    dense[tuple(np.asarray(sparse.indices).T)] = sparse.values
    return dense


def dense_components(leaf: Any) -> list[np.ndarray]:
    """Return the dense NumPy arrays of which an array of any kind consists."""
    if data_adapter_utils.is_tensorflow_ragged(leaf):
        return [np.asarray(part) for part in (leaf.flat_values, *leaf.nested_row_splits)]
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        return [np.asarray(part) for part in (leaf.indices, leaf.values, leaf.dense_shape)]
    if data_adapter_utils.is_jax_sparse(leaf):
        return [np.asarray(part) for part in (leaf.indices, leaf.data)]
    if data_adapter_utils.is_torch_tensor(leaf):
        return [array_of_torch(leaf)]
    return [np.asarray(leaf)]


def length_of_dataloader(loader: Any) -> int | None:
    """Return the number of batches of a torch ``DataLoader``; None if unknown, or for others."""
    if is_torch_dataloader(loader) and hasattr(loader.dataset, "__len__"):
        return len(loader)
    return None
