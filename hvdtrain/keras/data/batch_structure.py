"""Batches as nested structures of tensors: packing, naming, counting, fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import DataError

__all__ = [
    "blank",
    "chain",
    "count_rows",
    "digest",
    "fingerprint",
    "is_absent",
    "leaf_names",
    "parts",
    "present",
    "refill",
    "row_text",
    "signature",
    "targets_first",
]

_PARTS = ("x", "y", "sample_weight")


def parts(batch: Any) -> tuple[Any, ...]:
    """Return a batch's parts, as Keras reads them: (x,), (x, y) or (x, y, sample_weight).

    Steps of the user's own may take batches of more parts.
    """
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def is_absent(leaf: Any) -> bool:
    """Whether a leaf (value or spec) stands for an input that is not there."""
    # Not every TensorFlow exports the class of NoneTensorSpec.
    return (
        leaf is None
        or isinstance(leaf, (tf.OptionalSpec, tf.experimental.Optional))
        or type(leaf).__name__ == "NoneTensorSpec"
    )


def present(batch: Any) -> list[Any]:
    """The leaves that are there."""
    return [leaf for leaf in keras.tree.flatten(batch) if not is_absent(leaf)]


def refill(batch: Any, leaves: Iterable[Any]) -> Any:
    """The structure of a batch with other leaves in place of those that are there."""
    rest = iter(leaves)
    return keras.tree.map_structure(lambda leaf: None if is_absent(leaf) else next(rest), batch)


def leaf_names(batch: Any) -> list[str]:
    """Return a name for each leaf of a batch, for example ``x['image']`` or ``y``."""
    split = parts(batch)
    names = _PARTS if len(split) <= len(_PARTS) else [f"part {n}" for n in range(len(split))]
    return [
        names[path[0]] + "".join(f"[{key!r}]" for key in path[1:])
        for path, _ in keras.tree.flatten_with_path(split)
    ]


def count_rows(leaf: Any) -> tf.Tensor:
    """Rows of a dense, ragged or sparse leaf, int32 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def row_text(spec: tf.TypeSpec) -> str:
    """Type and shape of one row, in words; batch dimension left out."""
    kind = {tf.RaggedTensorSpec: "ragged ", tf.SparseTensorSpec: "sparse "}.get(type(spec), "")
    shape = spec.shape
    inner = "unknown" if shape.rank is None else str(tuple(shape[1:].as_list()))
    return f"{kind}{spec.dtype.name} of shape {inner} per row"


def signature(batch_spec: Any) -> dict[str, str]:
    """Map leaf names to type and shape of a row of each, for comparing between ranks."""
    leaves = keras.tree.flatten(batch_spec)
    return {
        name: "None" if is_absent(leaf) else row_text(leaf)
        for name, leaf in zip(leaf_names(batch_spec), leaves)
    }


def targets_first(batch: Any) -> list[Any]:
    """The leaves to recognise a batch by: targets and weights if there are any, else inputs.

    Inputs may be augmented at random on each rank, which is no mistake; different targets are.
    """
    inputs, *targets = parts(batch)
    return present(targets) or present(inputs)


def fingerprint(leaves: Sequence[Any]) -> str:
    """The digest of tensors that have values, in hexadecimal digits."""
    with tf.device("CPU:0"):
        return str(digest(leaves).numpy().tobytes().hex())


def digest(leaves: Sequence[Any]) -> tf.Tensor:
    """A fingerprint of tensors, uint8 of shape (8,); eager or inside a graph."""
    parts = tf.nest.flatten(list(leaves), expand_composites=True)
    return _hash(tf.concat([_hash(part) for part in parts], axis=0))


def chain(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    """The digest of a stream, from the digest of its start and that of what comes next."""
    return _hash(tf.concat([before, after], axis=0))


def _hash(tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [1, -1])
    return tf.reshape(tf.raw_ops.Fingerprint(data=flat, method="farmhash64"), [8])


def blank(spec: tf.TypeSpec) -> Any:
    """A value of the given spec, with 1 for every dimension that it leaves open.

    Raises:
        DataError: The spec is of a kind that can't be shared out.
    """
    if isinstance(spec, tf.RaggedTensorSpec):
        rows = spec.shape[0] or 1
        splits = [tf.zeros([rows + 1], spec.row_splits_dtype)]
        splits += [tf.zeros([1], spec.row_splits_dtype)] * (spec.ragged_rank - 1)
        inner = [size or 1 for size in spec.shape[spec.ragged_rank + 1 :]]
        return tf.RaggedTensor.from_nested_row_splits(tf.zeros([0, *inner], spec.dtype), splits)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [size or 1 for size in spec.shape]
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape
        )
    if isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource):
        shape = [1] if spec.shape.rank is None else [size or 1 for size in spec.shape]
        return tf.zeros(shape, spec.dtype)
    raise DataError(
        f"A dataset has a component of the kind {type(spec).__name__} ({spec}), which can't be "
        "shared out. Expected dense, ragged or sparse tensors; convert it with Dataset.map, or "
        "shard the dataset yourself and pass presharded=True."
    )
