"""Arrays in memory, the same on every rank: each rank gathers its own rows by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.errors import DataError
from hvdtrain.keras.data import batch_structure
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.dataset_options import untuned
from hvdtrain.keras.data.partition import (
    Shuffle,
    epoch_order,
    joint_steps,
    rank_share,
    units_left,
)
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import JOINT_ROWS_UNKNOWN, ShardedInput, Share
from hvdtrain.private_api import keras as private_keras

__all__ = ["ArraySource", "ShardedArrays"]

_SAMPLED_ROWS = 64


class ArraySource:
    """NumPy arrays, tensors, pandas and SciPy data and the like, nested, all of equal length."""

    unit = "samples"

    def __init__(self, x: Any, y: Any, sample_weight: Any, plan: ShardPlan) -> None:
        self.plan = plan
        self._batch, self.units = private_keras.pack_arrays(x, y, sample_weight, plan.class_weight)
        # With rows of its own and a given number of steps, each rank chooses another batch size.
        self.sizes_differ = plan.batch_size is None and plan.presharded and plan.steps is not None
        self.each = plan.batch_size or private_keras.default_batch_size(
            self.units, plan.steps, plan.size
        )
        self._shuffle: Shuffle = plan.shuffle
        if not isinstance(plan.shuffle, str):
            self._shuffle = bool(plan.shuffle)
        elif plan.shuffle != "batch":
            raise DataError(
                f"shuffle={plan.shuffle!r} is unknown; expected True, False or 'batch'."
            )
        with tf.device("CPU:0"):
            self._columns = [
                None if leaf is None else private_keras.column(leaf)
                for leaf in keras.tree.flatten(self._batch)
            ]

    def report(self) -> InputReport:
        """The arrays' rows, types and shapes, and fingerprints of some rows of each."""
        rows, plan = self.units, self.plan
        if rows == 0 and not plan.presharded:
            raise DataError("The input arrays have no rows; expected at least one.")
        sampled = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, _SAMPLED_ROWS), dtype=int))
        names = batch_structure.leaf_names(self._batch)
        structure = {"kind of input": "arrays", "steps": plan.steps}
        content: dict[str, Any] = {
            "number of samples": rows,
            "batch_size": self.each,
            "shuffle": self._shuffle,
            "seed": plan.seed,
        }
        with tf.device("CPU:0"):
            for name, leaf in zip(names, self._gather(tf.constant(sampled, tf.int64))):
                if leaf is None:
                    structure[name] = "None"
                    continue
                structure[name] = batch_structure.row_text(tf.type_spec_from_value(leaf))
                content[f"content of {name}"] = batch_structure.fingerprint([leaf])
        return InputReport(
            structure=structure,
            content=content,
            steps=joint_steps(rows, self.each, plan.shards),
        )

    def shard(self, steps: int | None) -> ShardedArrays:
        """This rank's rows, epoch by epoch."""
        return ShardedArrays(self, steps or 0)

    def _gather(self, indices: Any) -> list[Any]:
        return [None if c is None else private_keras.gather(c, indices) for c in self._columns]

    def share_of_pass(self, position: Position) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the whole steps and of the last one, as ``partition.RankShare``."""
        plan = self.plan
        order = epoch_order(
            self.units,
            shuffle=self._shuffle,
            joint_batch=position.joint_batch or self.each * plan.shards,
            seed=plan.seed,
            epoch=position.epoch,
        )
        left = units_left(order, position)
        share = rank_share(left, batch_size=self.each, rank=plan.shard, size=plan.shards)
        return share.whole, share.last

    def index_dataset(
        self, position_of_pass: Callable[[], Position], rows: int, steps: int
    ) -> tf.data.Dataset:
        """Elements (indices, rows, joint_rows) of one pass, ``steps`` of them.

        Args:
            position_of_pass: Called when a pass starts; returns where.
            rows: Samples that are left there, at least 1.
            steps: Joint steps; those beyond this rank's data have rows = 0.
        """
        plan, each = self.plan, self.each
        whole_steps, rest = divmod(rows, each * plan.shards)
        start, stop = split_evenly(rest, plan.shards)[plan.shard]
        last_shape = max(stop - start, min(rest, 1))
        padding = steps - whole_steps - (rest > 0)

        def known(joint_rows: int) -> tf.Tensor:
            return tf.constant(JOINT_ROWS_UNKNOWN if plan.presharded else joint_rows, tf.int32)

        @tf.autograph.experimental.do_not_convert
        def order_of_pass(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            whole, last = tf.numpy_function(
                lambda: self.share_of_pass(position_of_pass()), [], [tf.int64, tf.int64]
            )
            whole.set_shape([whole_steps, each])
            last.set_shape([last_shape])
            return whole, last

        @tf.autograph.experimental.do_not_convert
        def steps_of_pass(whole: tf.Tensor, last: tf.Tensor) -> tf.data.Dataset:
            parts = []
            if whole_steps:
                counts = tf.fill([whole_steps], each)
                joint = tf.fill([whole_steps], known(each * plan.shards))
                parts.append(tf.data.Dataset.from_tensor_slices((whole, counts, joint)))
            if rest:
                element = (last, tf.constant(stop - start, tf.int32), known(rest))
                parts.append(tf.data.Dataset.from_tensors(element))
            if padding:
                element = (tf.zeros([1], tf.int64), tf.constant(0, tf.int32), known(0))
                parts.append(tf.data.Dataset.from_tensors(element).repeat(padding))
            for part in parts[1:]:
                parts[0] = parts[0].concatenate(part)
            return parts[0]

        return tf.data.Dataset.range(1).map(order_of_pass).flat_map(steps_of_pass)

    def dataset(
        self, position_of_pass: Callable[[], Position], rows: int, steps: int
    ) -> tf.data.Dataset:
        """Make the shares of one pass; arguments as in ``index_dataset``."""

        @tf.autograph.experimental.do_not_convert
        def fetch(indices: tf.Tensor, rows: tf.Tensor, joint_rows: tf.Tensor) -> Share:
            if self.plan.collectives.survives_losses:
                # Another number of ranks may leave another last batch: the same graph takes both.
                indices = tf.raw_ops.PlaceholderWithDefault(input=indices, shape=[None])
            batch = keras.tree.pack_sequence_as(self._batch, self._gather(indices))
            return Share(batch, rows, joint_rows)

        with tf.device("CPU:0"):
            if rows:
                dataset = self.index_dataset(position_of_pass, rows, steps)
                dataset = dataset.map(fetch, num_parallel_calls=tf.data.AUTOTUNE)
            else:
                dataset = self._nothing(steps)
            options = tf.data.Options()
            # As in Keras: optimising would serialise the graph with the arrays that it captured.
            options.experimental_optimization.apply_default_optimizations = False
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
            return untuned(dataset.with_options(options)).prefetch(tf.data.AUTOTUNE)

    def _nothing(self, steps: int) -> tf.data.Dataset:
        """Make steps without rows, for a rank without any among others or for the end of a pass."""
        leaves = batch_structure.present(self._gather(tf.zeros([0], tf.int64)))
        blanks = [batch_structure.blank(tf.type_spec_from_value(leaf)) for leaf in leaves]
        batch = batch_structure.refill(self._batch, blanks)
        share = Share(batch, tf.constant(0, tf.int32), tf.constant(JOINT_ROWS_UNKNOWN, tf.int32))
        return tf.data.Dataset.from_tensors(share).repeat(steps)


class ShardedArrays(ShardedInput):
    """One rank's rows; a pass has the order of the epoch in which it starts."""

    def __init__(self, source: ArraySource, steps: int) -> None:
        self._arrays = source
        self._epoch = 0
        # Passes of as many rows share a dataset, which asks where it begins: making one takes as
        # long as some steps of a small model.
        self._position = Position(epoch=0)
        self._size: tuple[int, int] | None = None
        self._dataset: tf.data.Dataset | None = None
        super().__init__(
            source,
            lambda: source.dataset(lambda: Position(epoch=self._epoch), source.units, steps),
            steps=steps,
            joint_rows_known=not source.plan.presharded,
        )

    def _dataset_from(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        if position.start and self._arrays.sizes_differ:
            raise DataError(
                f"Training can't go on after {position.start} samples of an epoch: with "
                "presharded=True and steps_per_epoch alone, every rank has another batch size. "
                "Pass batch_size as well."
            )
        self._position = position
        size = position.left_of(self._arrays.units), steps or 0
        if self._dataset is None or self._size != size:
            self._size = size
            self._dataset = self._arrays.dataset(lambda: self._position, *size)
        return self._dataset

    def on_epoch_begin(self, epoch: int) -> None:
        """Set the epoch whose order the next pass has."""
        self._epoch = epoch
