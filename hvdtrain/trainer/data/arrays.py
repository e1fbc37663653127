"""Input that consists of arrays in memory.

All ranks have the same arrays, and each rank gathers its rows by index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

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
from hvdtrain.private_api import keras_data
from hvdtrain.trainer.data import batch_structure
from hvdtrain.trainer.data.host_batches import JOINT_ROWS_UNKNOWN, HostBatches, Share
from hvdtrain.trainer.data.sharded_input import ShardedInput, ShardPlan

__all__ = ["ShardedArrays"]

_SAMPLED_ROWS = 64
# Below this size, passing a batch between threads takes longer than gathering its rows.
_LEAST_BYTES_TO_READ_AHEAD = 1 << 18


class ShardedArrays(ShardedInput):
    """One rank's share of arrays.

    The arrays may be NumPy arrays, tensors, pandas or SciPy data, or nested structures of them.
    """

    unit = "samples"

    def __init__(self, x: Any, y: Any, sample_weight: Any, plan: ShardPlan) -> None:
        super().__init__(plan)
        self._batch, self.units = keras_data.pack_arrays(x, y, sample_weight, plan.class_weight)
        self._rows = self.units
        self.each = plan.batch_size or keras_data.default_batch_size(
            self._rows, plan.steps, plan.size
        )
        if plan.shuffle != "batch" and isinstance(plan.shuffle, str):
            raise DataError(f"shuffle must be True, False or 'batch', got {plan.shuffle!r}.")
        self._shuffle: Shuffle = plan.shuffle if plan.shuffle == "batch" else bool(plan.shuffle)
        self.joint_rows_known = not plan.presharded
        batch_structure.check_numeric(self._batch)
        self._columns = [
            None if leaf is None else self._column(leaf) for leaf in keras.tree.flatten(self._batch)
        ]
        self._epoch = 0

    def report(self) -> InputReport:
        """Report the types and shapes of the arrays, and digests of some of their rows."""
        rows, plan = self._rows, self.plan
        if rows == 0 and not plan.presharded:
            raise DataError("The input arrays are empty; pass at least one row.")
        sampled = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, _SAMPLED_ROWS), dtype=int))
        batch = self._gather(sampled)
        leaves = keras.tree.flatten(batch)
        spec = batch_structure.batch_spec([batch])
        return InputReport(
            structure={
                "kind of input": "arrays",
                "steps": plan.steps,
                **batch_structure.signature(spec),
            },
            content={
                "number of samples": rows,
                "batch_size": self.each,
                "shuffle": self._shuffle,
                "seed": plan.seed,
                **{
                    f"content of {name}": batch_structure.digest([leaf])
                    for name, leaf in zip(batch_structure.leaf_names(batch), leaves)
                    if leaf is not None
                },
            },
            steps=joint_steps(rows, self.each, plan.shards),
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
        self._pass: Any = None

    def on_epoch_begin(self, epoch: int) -> None:
        """Set the epoch. It determines the order of the samples in the next pass over the data."""
        self._epoch = epoch

    def _whole_pass(self) -> Any:
        return self._make(lambda: Position(epoch=self._epoch), self._rows, self.steps or 0)

    def _rest_of_pass(self, position: Position, steps: int | None, repeatable: bool) -> Any:
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

    @staticmethod
    def _column(array: Any) -> Any:
        """Convert an array so that ``_rows_of`` can read rows from it."""
        return keras_data.column(array)

    @staticmethod
    def _rows_of(column: Any, indices: Any) -> Any:
        return keras_data.gather(column, indices)

    def _gather(self, indices: Any) -> Any:
        """Return a batch with the samples at ``indices``."""
        leaves = [None if c is None else self._rows_of(c, indices) for c in self._columns]
        return keras.tree.pack_sequence_as(self._batch, leaves)

    def _make(self, position_of_pass: Callable[[], Position], rows: int, steps: int) -> Any:
        """Make this rank's share of each step in a pass over the data.

        ``rows`` is the number of samples that are left at the position where the pass starts. If
        this rank's data ends early, the last steps have rows = 0.
        """
        full_steps, rest, own_rest = self._step_sizes(rows)
        joint_batch = self.each * self.plan.shards

        def shares() -> Iterator[Share]:
            full, last = self._share_of_pass(position_of_pass())
            for indices in full:
                yield Share(self._gather(indices), self.each, self._known(joint_batch))
            if rest:
                yield Share(self._gather(last), own_rest, self._known(rest))
            # Another shape would be compiled again.
            padding = np.zeros(self.each if full_steps else 1, np.int64)
            for _ in range(steps - full_steps - (rest > 0)):
                batch = self._gather(padding) if self._rows else batch_structure.blank_batch(spec)
                yield Share(batch, 0, self._known(0))

        # An empty batch has all but the number of rows.
        empty = self._gather(np.zeros(0, np.int64))
        spec = batch_structure.batch_spec([empty], self.each if full_steps == steps else None)
        reads_ahead = batch_structure.row_bytes(spec) * self.each >= _LEAST_BYTES_TO_READ_AHEAD
        return HostBatches(shares, spec, num_batches=steps, reads_ahead=reads_ahead)

    def _step_sizes(self, rows: int) -> tuple[int, int, int]:
        """Return the number of full steps, and the joint rows and own rows of the last step."""
        plan = self.plan
        full_steps, rest = divmod(rows, self.each * plan.shards)
        start, stop = split_evenly(rest, plan.shards)[plan.shard]
        return full_steps, rest, stop - start

    def _known(self, joint_rows: int) -> int:
        return JOINT_ROWS_UNKNOWN if self.plan.presharded else joint_rows

    def _share_of_pass(self, position: Position) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's samples from a position on, as ``partition.rank_share`` does."""
        plan = self.plan
        order = epoch_order(
            self._rows,
            shuffle=self._shuffle,
            joint_batch=position.joint_batch or self.each * plan.shards,
            seed=plan.seed,
            epoch=position.epoch,
        )
        left = remaining_units(order, position)
        return rank_share(left, batch_size=self.each, rank=plan.shard, size=plan.shards)
