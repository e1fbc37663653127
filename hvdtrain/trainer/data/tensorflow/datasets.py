"""Conversion between ``HostBatches`` and ``tf.data``, and functions for elements of datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.private_api import keras_data, keras_tensorflow
from hvdtrain.trainer.data.batch_structure import is_absent, present_leaves, replace_leaves
from hvdtrain.trainer.data.host_batches import HostBatches, Share

__all__ = [
    "DatasetClock",
    "blank_value",
    "chain_digests",
    "count_rows",
    "describe_row",
    "digest",
    "from_dataset",
    "to_dataset",
    "without_autotuning",
]


def to_dataset(batches: HostBatches) -> tf.data.Dataset:
    """Return a dataset with the same steps."""
    spec = batches.element_spec.batch

    def elements() -> Iterator[tuple[Any, ...]]:
        for share in batches.make():
            yield (
                *present_leaves(share.batch),
                np.int32(share.rows),
                np.int32(share.joint_rows),
            )

    @tf.autograph.experimental.do_not_convert
    def pack(*element: Any) -> Share:
        *leaves, rows, joint_rows = element
        return Share(replace_leaves(spec, leaves), rows, joint_rows)

    with tf.device("CPU:0"):
        count = tf.TensorSpec([], tf.int32)
        signature = (*map(keras_tensorflow.tensor_spec, present_leaves(spec)), count, count)
        dataset = tf.data.Dataset.from_generator(elements, output_signature=signature).map(pack)
        if batches.num_batches is not None:
            cardinality = tf.data.experimental.assert_cardinality(batches.num_batches)
            dataset = dataset.apply(cardinality)
        dataset = without_autotuning(dataset)
        return dataset.prefetch(1) if batches.reads_ahead else dataset


def from_dataset(dataset: tf.data.Dataset) -> HostBatches:
    """Return the steps of a dataset for Keras' torch and JAX backends."""

    def make() -> Iterator[Share]:
        with tf.device("CPU:0"):
            iterator = iter(dataset)
        for share in iterator:
            batch = keras.tree.map_structure(
                lambda leaf: None if is_absent(leaf) else keras_data.host_array(leaf), share.batch
            )
            yield Share(batch, int(share.rows), int(share.joint_rows))

    def spec(leaf: Any) -> keras.KerasTensor | None:
        if is_absent(leaf):
            return None
        # Other backends read ragged tensors as dense ones.
        sparse = isinstance(leaf, tf.SparseTensorSpec) and keras.backend.backend() == "jax"
        return keras.KerasTensor(leaf.shape.as_list(), leaf.dtype.name, sparse=sparse)

    cardinality = int(dataset.cardinality())
    return HostBatches(
        make,
        keras.tree.map_structure(spec, dataset.element_spec.batch),
        num_batches=cardinality if cardinality >= 0 else None,
        reads_ahead=False,
    )


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset with a fixed order and without autotuning.

    Autotuning would delay the end of ``fit``. When an iterator is deleted, TensorFlow waits for the
    thread that tunes it. TensorFlow wakes that thread before it marks the iterator as cancelled
    (``CancellationManager::StartCancelWithStatus``), so the thread often sleeps for another period
    of 10 ms to a minute. Without autotuning, ``num_parallel_calls=AUTOTUNE`` uses up to 16 threads,
    and prefetching still adapts. A pipeline that sets any of ``options.autotune`` keeps its
    settings.
    """
    options = tf.data.Options()
    options.deterministic = True
    if dataset.options().autotune == tf.data.experimental.AutotuneOptions():
        options.autotune.enabled = False
    return dataset.with_options(options)


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


def digest(leaves: Sequence[Any]) -> tf.Tensor:
    """Return a digest of tensors, uint8 of shape (8,). This also works in a graph."""
    components = tf.nest.flatten(list(leaves), expand_composites=True)
    return _hash(tf.concat([_hash(component) for component in components], axis=0))


def chain_digests(stream: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """Return the digest of a stream, from its digest before a batch and the batch's digest."""
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


class DatasetClock:
    """Measures time inside ``tf.data``, on the thread that requests a batch.

    With ``steps_per_execution`` above 1, TensorFlow may request a batch while the previous step
    still computes. The measured time then includes time in which training did not wait.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._clock = tf.data.Dataset.from_tensors(0).repeat().map(_now)

    @property
    def seconds(self) -> float:
        """The time that was waited for all elements of all datasets."""
        return float(self._seconds.numpy())

    def timed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset with the same elements, whose time is measured."""
        seconds = self._seconds

        @tf.autograph.experimental.do_not_convert
        def add_wait(requested_s: tf.Tensor, element: Any) -> Any:
            seconds.assign_add(tf.timestamp() - requested_s)
            return element

        options = tf.data.Options()
        # Autotuning would add a prefetch buffer after this stage. Then the time that the buffer's
        # thread waits would be measured, and not the time that training waits.
        options.experimental_optimization.inject_prefetch = False
        # zip requests its inputs in this order: first the time, then the batch.
        return tf.data.Dataset.zip((self._clock, dataset)).map(add_wait).with_options(options)


@tf.autograph.experimental.do_not_convert
def _now(_: tf.Tensor) -> tf.Tensor:
    return tf.timestamp()
