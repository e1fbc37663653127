"""Functions for batches, which are nested structures of tensors.

A leaf is a tensor of a batch, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.private_api import keras as private_keras
from hvdtrain.private_api import keras_tensorflow
from hvdtrain.trainer.data.sharded_input import Share, without_autotuning

__all__ = [
    "EXAMINED_BATCHES",
    "batch_parts",
    "blank_value",
    "chain_digests",
    "count_rows",
    "describe_row",
    "digest",
    "fingerprint",
    "identifying_leaves",
    "is_absent",
    "leaf_names",
    "present_leaves",
    "replace_leaves",
    "signature",
    "standardize",
    "to_dataset",
]

EXAMINED_BATCHES = 2
"""The number of batches that Keras examines for types and shapes."""

_PARTS = ("x", "y", "sample_weight")


def batch_parts(batch: Any) -> tuple[Any, ...]:
    """Return the parts of a batch: x, y and sample_weight.

    A model with its own ``train_step`` may use batches with other parts.
    """
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def is_absent(leaf: Any) -> bool:
    """Return whether a leaf is None. The argument may also be the spec of a leaf."""
    # Some versions of TensorFlow don't export NoneTensorSpec.
    return (
        leaf is None
        or isinstance(leaf, (tf.OptionalSpec, tf.experimental.Optional))
        or type(leaf).__name__ == "NoneTensorSpec"
    )


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


def count_rows(leaf: Any) -> tf.Tensor:
    """Return the number of rows of a dense, ragged or sparse leaf as an int32 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def describe_row(spec: tf.TypeSpec) -> str:
    """Return a text that describes the type and shape of one row of a leaf."""
    kind = {tf.RaggedTensorSpec: "ragged ", tf.SparseTensorSpec: "sparse "}.get(type(spec), "")
    shape = spec.shape
    inner = "unknown" if shape.rank is None else str(tuple(shape[1:].as_list()))
    return f"{kind}{spec.dtype.name} of shape {inner} per row"


def signature(batch_spec: Any) -> dict[str, str]:
    """Map the name of each leaf to a description of its rows, as ``describe_row`` returns it."""
    leaves = keras.tree.flatten(batch_spec)
    return {
        name: "None" if is_absent(leaf) else describe_row(leaf)
        for name, leaf in zip(leaf_names(batch_spec), leaves)
    }


def identifying_leaves(batch: Any) -> list[Any]:
    """Return the leaves by which ranks check that they have the same batch.

    These are the targets and sample weights. Inputs are compared only if a batch has neither of
    them, because random augmentation may make inputs differ between ranks.
    """
    inputs, *targets = batch_parts(batch)
    return present_leaves(targets) or present_leaves(inputs)


def fingerprint(leaves: Sequence[Any]) -> str:
    """Return the ``digest`` of eager tensors as a string of hexadecimal digits."""
    with tf.device("CPU:0"):
        return str(digest(leaves).numpy().tobytes().hex())


def digest(leaves: Sequence[Any]) -> tf.Tensor:
    """Return a digest of tensors, uint8 of shape (8,)."""
    components = tf.nest.flatten(list(leaves), expand_composites=True)
    return _hash(tf.concat([_hash(component) for component in components], axis=0))


def chain_digests(stream: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """Return the digest of a stream after one more batch.

    The arguments are the digest of the stream before this batch, and the digest of the batch.
    """
    return _hash(tf.concat([stream, batch], axis=0))


def _hash(tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [1, -1])
    return tf.reshape(tf.raw_ops.Fingerprint(data=flat, method="farmhash64"), [8])


def blank_value(spec: tf.TypeSpec) -> Any:
    """Return a tensor of zeros that matches a spec, with size 1 for each unknown dimension.

    Raises:
        DataError: If the kind of spec is not supported.
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
        f"Components of a dataset must be dense, ragged or sparse tensors, got "
        f"{type(spec).__name__} ({spec}); convert them with Dataset.map, or shard the dataset and "
        "pass presharded=True."
    )


def standardize(batch: Any, class_weight: Any, source: str, max_parts: int | None = None) -> Any:
    """Convert a batch that Python code yielded to the structure that Keras uses.

    Args:
        batch: The batch.
        class_weight: The argument of ``fit``.
        source: The name of the code that made the batch, for error messages.
        max_parts: The largest number of parts that Keras accepts.

    Raises:
        ValueError: If Keras doesn't accept the batch.
    """
    batch = keras.tree.map_structure(keras_tensorflow.host_array, batch)
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
        batch = (*batch, private_keras.class_sample_weights(batch[1], class_weight))
    return keras.tree.lists_to_tuples(batch)


def to_dataset(
    elements: Callable[[], Iterator[tuple[Any, ...]]],
    example: Any,
    specs: Sequence[tf.TypeSpec],
    steps: int | None,
) -> tf.data.Dataset:
    """Return a dataset whose elements come from a Python function. The dataset doesn't prefetch.

    Args:
        elements: A function that yields a tuple for each step. The tuple contains the leaves of a
            batch, followed by the numbers ``rows`` and ``joint_rows`` of a ``Share``.
        example: A batch with the right structure.
        specs: The spec of each leaf.
        steps: The number of steps, or None if it is unknown.
    """

    @tf.autograph.experimental.do_not_convert
    def pack(*element: Any) -> Share:
        *leaves, rows, joint_rows = element
        return Share(replace_leaves(example, leaves), rows, joint_rows)

    with tf.device("CPU:0"):
        output = (*specs, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32))
        dataset = tf.data.Dataset.from_generator(elements, output_signature=output).map(pack)
        if steps is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        return without_autotuning(dataset)
