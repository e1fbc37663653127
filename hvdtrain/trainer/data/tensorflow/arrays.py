"""Arrays in memory on the TensorFlow backend, whose rows ``tf.data`` gathers in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.data.partition import Position
from hvdtrain.private_api import keras_tensorflow
from hvdtrain.trainer.data.arrays import ShardedArrays
from hvdtrain.trainer.data.batch_structure import present_leaves, replace_leaves
from hvdtrain.trainer.data.host_batches import Share
from hvdtrain.trainer.data.tensorflow.datasets import blank_value, without_autotuning

__all__ = ["TensorflowArrays"]


class TensorflowArrays(ShardedArrays):
    """One rank's share of arrays, read with ``tf.data``."""

    @staticmethod
    def _column(array: Any) -> Any:
        with tf.device("CPU:0"):
            return keras_tensorflow.column(array)

    @staticmethod
    def _rows_of(column: Any, indices: Any) -> Any:
        with tf.device("CPU:0"):
            return keras_tensorflow.gather(column, tf.cast(indices, tf.int64))

    def _make(self, position_of_pass: Callable[[], Position], rows: int, steps: int) -> Any:
        @tf.autograph.experimental.do_not_convert
        def fetch(indices: tf.Tensor, rows: tf.Tensor, joint_rows: tf.Tensor) -> Share:
            if self.plan.collectives.survives_losses:
                # Make the shapes unknown, because the last batch may have a different size after a
                # rank is lost.
                indices = tf.raw_ops.PlaceholderWithDefault(input=indices, shape=[None])
            return Share(self._gather(indices), rows, joint_rows)

        with tf.device("CPU:0"):
            if rows:
                indices = self._indices(position_of_pass, rows, steps)
                dataset = indices.map(fetch, num_parallel_calls=tf.data.AUTOTUNE)
            else:
                dataset = self._empty_steps(steps)
            options = tf.data.Options()
            # Don't optimize, as in Keras. It would serialize the graph with the captured arrays.
            options.experimental_optimization.apply_default_optimizations = False
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
            return without_autotuning(dataset.with_options(options)).prefetch(tf.data.AUTOTUNE)

    def _indices(
        self, position_of_pass: Callable[[], Position], rows: int, steps: int
    ) -> tf.data.Dataset:
        """Make a dataset of (indices, rows, joint_rows). ``_make`` describes the arguments."""
        plan, each = self.plan, self.each
        full_steps, rest, own_rest = self._step_sizes(rows)
        padding = steps - full_steps - (rest > 0)

        def known(joint_rows: int) -> tf.Tensor:
            return tf.constant(self._known(joint_rows), tf.int32)

        @tf.autograph.experimental.do_not_convert
        def start_pass(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            full, last = tf.numpy_function(
                lambda: self._share_of_pass(position_of_pass()), [], [tf.int64, tf.int64]
            )
            full.set_shape([full_steps, each])
            last.set_shape([max(own_rest, min(rest, 1))])
            return full, last

        @tf.autograph.experimental.do_not_convert
        def steps_of_pass(full: tf.Tensor, last: tf.Tensor) -> tf.data.Dataset:
            sections = []
            if full_steps:
                counts = tf.fill([full_steps], each)
                joint = tf.fill([full_steps], known(each * plan.shards))
                sections.append(tf.data.Dataset.from_tensor_slices((full, counts, joint)))
            if rest:
                element = (last, tf.constant(own_rest, tf.int32), known(rest))
                sections.append(tf.data.Dataset.from_tensors(element))
            if padding:
                element = (tf.zeros([1], tf.int64), tf.constant(0, tf.int32), known(0))
                sections.append(tf.data.Dataset.from_tensors(element).repeat(padding))
            for section in sections[1:]:
                sections[0] = sections[0].concatenate(section)
            return sections[0]

        return tf.data.Dataset.range(1).map(start_pass).flat_map(steps_of_pass)

    def _empty_steps(self, steps: int) -> tf.data.Dataset:
        """Make a dataset of steps with rows = 0, for a rank that has no data left."""
        leaves = present_leaves(self._gather(tf.zeros([0], tf.int64)))
        blanks = [blank_value(tf.type_spec_from_value(leaf)) for leaf in leaves]
        batch = replace_leaves(self._batch, blanks)
        share = Share(batch, tf.constant(0, tf.int32), tf.constant(self._known(0), tf.int32))
        return tf.data.Dataset.from_tensors(share).repeat(steps)
