"""Input that consists of arrays in memory.

All ranks have the same arrays, and each rank gathers its rows by index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.data.input_agreement import InputReport
from hvdtrain.data.partition import (
    Position,
    Shuffle,
    epoch_order,
    joint_steps,
    rank_share,
    remaining_units,
)
from hvdtrain.errors import DataError
from hvdtrain.private_api import keras as private_keras
from hvdtrain.private_api import keras_tensorflow
from hvdtrain.trainer.data import batch_structure
from hvdtrain.trainer.data.sharded_input import (
    JOINT_ROWS_UNKNOWN,
    ShardedInput,
    ShardPlan,
    Share,
    without_autotuning,
)

__all__ = ["ShardedArrays"]

_SAMPLED_ROWS = 64


class ShardedArrays(ShardedInput):
    """One rank's share of arrays.

    The arrays may be NumPy arrays, tensors, pandas or SciPy data, or nested structures of them.
    """

    unit = "samples"

    def __init__(self, x: Any, y: Any, sample_weight: Any, plan: ShardPlan) -> None:
        super().__init__(plan)
        self._batch, self.units = private_keras.pack_arrays(x, y, sample_weight, plan.class_weight)
        self._rows = self.units
        self.each = plan.batch_size or private_keras.default_batch_size(
            self._rows, plan.steps, plan.size
        )
        if plan.shuffle != "batch" and isinstance(plan.shuffle, str):
            raise DataError(f"shuffle must be True, False or 'batch', got {plan.shuffle!r}.")
        self._shuffle: Shuffle = plan.shuffle if plan.shuffle == "batch" else bool(plan.shuffle)
        self.joint_rows_known = not plan.presharded
        with tf.device("CPU:0"):
            self._columns = [
                None if leaf is None else keras_tensorflow.column(leaf)
                for leaf in keras.tree.flatten(self._batch)
            ]
        self._epoch = 0

    def report(self) -> InputReport:
        """Report the types and shapes of the arrays, and digests of some of their rows."""
        rows, plan = self._rows, self.plan
        if rows == 0 and not plan.presharded:
            raise DataError("The input arrays are empty; pass at least one row.")
        sampled = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, _SAMPLED_ROWS), dtype=int))
        structure = {"kind of input": "arrays", "steps": plan.steps}
        content: dict[str, Any] = {
            "number of samples": rows,
            "batch_size": self.each,
            "shuffle": self._shuffle,
            "seed": plan.seed,
        }
        with tf.device("CPU:0"):
            leaves = self._gather(tf.constant(sampled, tf.int64))
            for name, leaf in zip(batch_structure.leaf_names(self._batch), leaves):
                if leaf is None:
                    structure[name] = "None"
                    continue
                structure[name] = batch_structure.describe_row(tf.type_spec_from_value(leaf))
                content[f"content of {name}"] = batch_structure.fingerprint([leaf])
        return InputReport(
            structure=structure, content=content, steps=joint_steps(rows, self.each, plan.shards)
        )

    def set_steps(self, steps: int | None) -> None:
        """Set how many steps all ranks take together in one pass over the data.

        Passes that were started before can't be read any more.
        """
        super().set_steps(steps)
        # Passes of the same size share a dataset, because making a dataset takes as long as some
        # steps of a small model. The dataset reads the position when it is iterated.
        self._position = Position(epoch=0)
        self._pass_size: tuple[int, int] | None = None
        self._pass: tf.data.Dataset | None = None

    def on_epoch_begin(self, epoch: int) -> None:
        """Set the epoch. It determines the order of the samples in the next pass over the data."""
        self._epoch = epoch

    def _whole_pass(self) -> tf.data.Dataset:
        return self._make(lambda: Position(epoch=self._epoch), self._rows, self.steps or 0)

    def _rest_of_pass(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        plan = self.plan
        if position.start and plan.presharded and plan.batch_size is None and plan.steps:
            raise DataError(
                f"The input must have a batch_size to resume after {position.start} samples of an "
                "epoch: with presharded=True and steps_per_epoch alone, batch sizes differ between "
                "ranks. Pass batch_size as well."
            )
        self._position = position
        size = position.left_of(self._rows), steps or 0
        if self._pass is None or self._pass_size != size:
            self._pass_size = size
            self._pass = self._make(lambda: self._position, *size)
        return self._pass

    def _gather(self, indices: Any) -> list[Any]:
        return [None if c is None else keras_tensorflow.gather(c, indices) for c in self._columns]

    def _make(
        self, position_of_pass: Callable[[], Position], rows: int, steps: int
    ) -> tf.data.Dataset:
        """Make a dataset with this rank's share of each step in a pass over the data.

        Args:
            position_of_pass: Returns the position where the pass starts. Called when the pass
                starts.
            rows: The number of samples that are left at that position.
            steps: The number of steps, which is the same on all ranks. If this rank's data ends
                earlier, the last steps have rows = 0.
        """

        @tf.autograph.experimental.do_not_convert
        def fetch(indices: tf.Tensor, rows: tf.Tensor, joint_rows: tf.Tensor) -> Share:
            if self.plan.collectives.survives_losses:
                # Make the shapes unknown, because the last batch may have a different size after a
                # rank is lost.
                indices = tf.raw_ops.PlaceholderWithDefault(input=indices, shape=[None])
            batch = keras.tree.pack_sequence_as(self._batch, self._gather(indices))
            return Share(batch, rows, joint_rows)

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
        full_steps, rest = divmod(rows, each * plan.shards)
        start, stop = split_evenly(rest, plan.shards)[plan.shard]
        padding = steps - full_steps - (rest > 0)

        def known(joint_rows: int) -> tf.Tensor:
            return tf.constant(JOINT_ROWS_UNKNOWN if plan.presharded else joint_rows, tf.int32)

        def share_of_pass() -> tuple[np.ndarray, np.ndarray]:
            position = position_of_pass()
            order = epoch_order(
                self._rows,
                shuffle=self._shuffle,
                joint_batch=position.joint_batch or each * plan.shards,
                seed=plan.seed,
                epoch=position.epoch,
            )
            left = remaining_units(order, position)
            return rank_share(left, batch_size=each, rank=plan.shard, size=plan.shards)

        @tf.autograph.experimental.do_not_convert
        def start_pass(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            full, last = tf.numpy_function(share_of_pass, [], [tf.int64, tf.int64])
            full.set_shape([full_steps, each])
            last.set_shape([max(stop - start, min(rest, 1))])
            return full, last

        @tf.autograph.experimental.do_not_convert
        def steps_of_pass(full: tf.Tensor, last: tf.Tensor) -> tf.data.Dataset:
            sections = []
            if full_steps:
                counts = tf.fill([full_steps], each)
                joint = tf.fill([full_steps], known(each * plan.shards))
                sections.append(tf.data.Dataset.from_tensor_slices((full, counts, joint)))
            if rest:
                element = (last, tf.constant(stop - start, tf.int32), known(rest))
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
        leaves = batch_structure.present_leaves(self._gather(tf.zeros([0], tf.int64)))
        blanks = [batch_structure.blank_value(tf.type_spec_from_value(leaf)) for leaf in leaves]
        batch = batch_structure.replace_leaves(self._batch, blanks)
        share = Share(batch, tf.constant(0, tf.int32), tf.constant(JOINT_ROWS_UNKNOWN, tf.int32))
        return tf.data.Dataset.from_tensors(share).repeat(steps)
