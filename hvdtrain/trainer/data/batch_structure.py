"""Functions for batches, which are nested structures of arrays.

A leaf is an array of a batch, or None. Arrays may be NumPy arrays, or dense, ragged or sparse
tensors of a framework.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.errors import DataError
from hvdtrain.private_api import keras_data

__all__ = [
    "EXAMINED_BATCHES",
    "batch_parts",
    "batch_spec",
    "blank_batch",
    "check_numeric",
    "copy_of_leaf",
    "count_rows",
    "describe_row",
    "digest",
    "identifying_leaves",
    "is_absent",
    "leaf_names",
    "present_leaves",
    "replace_leaves",
    "row_bytes",
    "signature",
    "standardize",
]

EXAMINED_BATCHES = 2
"""The number of batches that Keras examines for types and shapes."""


def copy_of_leaf(leaf: Any) -> Any:
    """Return a copy of an array or tensor whose memory a user's program may use again."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.clone() if hasattr(leaf, "clone") else leaf  # a tensor of torch


_TEXT = ("O", "S", "U", "string")  # kinds of dtypes of NumPy, and the name of TensorFlow's

_PARTS = ("x", "y", "sample_weight")

# The classes of TensorFlow that stand for None. Some versions don't export all of them.
_ABSENT = {"NoneTensorSpec", "OptionalSpec", "Optional"}


def batch_parts(batch: Any) -> tuple[Any, ...]:
    """Return x, y and sample_weight, or other parts that a custom ``train_step`` may use."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def is_absent(leaf: Any) -> bool:
    """Return whether a leaf is None. The argument may also be the spec of a leaf."""
    return leaf is None or any(kind.__name__ in _ABSENT for kind in type(leaf).__mro__)


def present_leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch that are not None."""
    return [leaf for leaf in keras.tree.flatten(batch) if not is_absent(leaf)]


def replace_leaves(batch: Any, leaves: Iterable[Any]) -> Any:
    """Return a copy of a batch in which ``leaves`` replace the leaves that are not None."""
    rest = iter(leaves)
    return keras.tree.map_structure(lambda leaf: None if is_absent(leaf) else next(rest), batch)


def leaf_names(batch: Any) -> list[str]:
    """Return a name for each leaf of a batch, for example ``x['image']`` or ``y``."""
    split = batch_parts(batch)
    names = _PARTS if len(split) <= len(_PARTS) else [f"part {n}" for n in range(len(split))]
    return [
        names[path[0]] + "".join(f"[{key!r}]" for key in path[1:])
        for path, _ in keras.tree.flatten_with_path(split)
    ]


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return int(present_leaves(batch)[0].shape[0])


def check_numeric(batch: Any) -> None:
    """Check that a batch or its spec contains no text. Only the TensorFlow backend accepts text.

    Raises:
        DataError: If it contains text or objects.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return
    for name, leaf in zip(leaf_names(batch), keras.tree.flatten(batch)):
        dtype = getattr(leaf, "dtype", None)
        if getattr(dtype, "kind", getattr(dtype, "name", None)) in _TEXT:
            raise DataError(
                f"{name} must consist of numbers with Keras' {backend} backend, got dtype {dtype}; "
                "convert text to numbers before training."
            )


def batch_spec(batches: Sequence[Any], rows: int | None = None) -> Any:
    """Return the ``KerasTensor`` of each leaf that several batches have in common.

    ``rows`` is the number of rows of every batch, or None if it may differ.

    Raises:
        DataError: If Keras' backend doesn't support text.
        ValueError: If the batches have different structures.
    """
    check_numeric(batches[0])
    specs = keras_data.batch_specs([present_leaves(batch) for batch in batches], rows)
    return replace_leaves(batches[0], specs)


def describe_row(spec: keras.KerasTensor) -> str:
    """Return a text that describes the type and shape of one row of a leaf."""
    kind = "ragged " if spec.ragged else "sparse " if spec.sparse else ""
    return f"{kind}{spec.dtype} of shape {tuple(spec.shape[1:])} per row"


def row_bytes(spec: Any) -> int:
    """Return the size in memory of a row of a batch. Unknown dimensions count as 1."""
    return sum(
        np.dtype(leaf.dtype).itemsize * math.prod(size or 1 for size in leaf.shape[1:])
        for leaf in present_leaves(spec)
    )


def blank_batch(spec: Any) -> Any:
    """Return a batch of zeros that matches a spec, with size 1 for each unknown dimension."""

    def zeros(leaf: Any) -> Any:
        if leaf is None:
            return None
        return np.zeros([size or 1 for size in leaf.shape], leaf.dtype)

    return keras.tree.map_structure(zeros, spec)


def signature(batch_spec: Any, describe: Callable[[Any], str] = describe_row) -> dict[str, str]:
    """Map the name of each leaf to a description of its rows, as ``describe`` returns it."""
    leaves = keras.tree.flatten(batch_spec)
    return {
        name: "None" if is_absent(leaf) else describe(leaf)
        for name, leaf in zip(leaf_names(batch_spec), leaves)
    }


def identifying_leaves(batch: Any) -> list[Any]:
    """Return the leaves by which ranks check that they have the same batch.

    These are the targets and sample weights. Inputs are compared only if a batch has neither of
    them, because random augmentation may make inputs differ between ranks.
    """
    inputs, *targets = batch_parts(batch)
    return present_leaves(targets) or present_leaves(inputs)


def digest(leaves: Sequence[Any], before: str = "") -> str:
    """Return a digest of arrays as hexadecimal digits, following the digest ``before``."""
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    for leaf in leaves:
        for array in keras_data.dense_components(leaf):
            hashed.update(f"{array.dtype} {array.shape}".encode())
            data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
            hashed.update(data)
    return hashed.hexdigest()


def standardize(batch: Any, class_weight: Any, source: str, max_parts: int | None = None) -> Any:
    """Convert a batch that Python code yielded to the structure that Keras uses.

    ``source`` names the code that made the batch, for error messages. Keras accepts at most
    ``max_parts`` parts.

    Raises:
        ValueError: If Keras doesn't accept the batch.
    """
    batch = keras.tree.map_structure(_host_array(), batch)
    if hasattr(batch, "dtype"):
        batch = (batch,)
    count = len(batch) if isinstance(batch, (tuple, list)) else 1
    if not isinstance(batch, (dict, tuple, list)) or not 0 < count <= (max_parts or count):
        raise ValueError(
            f"{source} must return a dict, an array, or a tuple (inputs,), (inputs, targets) or "
            f"(inputs, targets, sample_weights), got {str(batch)[:100]} of type "
            f"{type(batch).__name__}."
        )
    if class_weight is not None and count > 1:
        if count > 2:
            raise ValueError("class_weight and sample_weight can't be used at the same time.")
        batch = (*batch, keras_data.class_sample_weights(batch[1], class_weight))
    return keras.tree.lists_to_tuples(batch)


def _host_array() -> Callable[[Any], Any]:
    """Return the function that converts an array of another library for Keras' backend."""
    if keras.backend.backend() == "tensorflow":
        from hvdtrain.private_api import keras_tensorflow

        return keras_tensorflow.host_array
    return keras_data.host_array
