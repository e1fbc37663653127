"""Input that is a ``keras.utils.PyDataset``.

Each rank asks this object only for its own batches.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import keras

from hvdtrain.data.input_agreement import InputReport, agree
from hvdtrain.data.partition import Position, epoch_order, joint_steps, remaining_units
from hvdtrain.errors import DataError
from hvdtrain.trainer.data import batch_structure
from hvdtrain.trainer.data.batch_structure import EXAMINED_BATCHES
from hvdtrain.trainer.data.host_batches import JOINT_ROWS_UNKNOWN, HostBatches, Share
from hvdtrain.trainer.data.sharded_input import ShardedInput, ShardPlan

__all__ = ["ShardedPyDataset"]


class ShardedPyDataset(ShardedInput):
    """One rank's share of the batches of a ``PyDataset``."""

    def __init__(self, dataset: keras.utils.PyDataset, plan: ShardPlan) -> None:
        super().__init__(plan)
        self._dataset = dataset
        self._length: int | None = None
        self._max_units: int | None = None
        self._shuffle = bool(plan.shuffle)
        self._epoch = 0
        kind, base = type(dataset), keras.utils.PyDataset
        self._may_reorder = (
            kind.on_epoch_begin is not base.on_epoch_begin
            or kind.on_epoch_end is not base.on_epoch_end
        )

    def report(self) -> InputReport:
        """Report the number, types and shapes of the batches, and a digest of the first batch."""
        plan = self.plan
        self._read_length(limits=True)
        count = min(EXAMINED_BATCHES, self.units or EXAMINED_BATCHES)
        examined = [self._standardize(self._dataset[index]) for index in range(count)]
        self._spec = batch_structure.batch_spec(examined)
        report = self._report_length()
        report.structure = {
            "kind of input": "a PyDataset",
            "steps": plan.steps,
            **batch_structure.signature(self._spec),
        }
        report.content.update(
            {
                "shuffle": self._shuffle,
                "seed": plan.seed,
                "content of the first batch": _digest(examined[0]),
            }
        )
        if plan.trains:
            self._dataset.on_epoch_end()  # as Keras does before the first epoch
        return report

    def _report_length(self) -> InputReport:
        return InputReport(
            content={"number of batches": "endless" if self._length is None else self._length},
            steps=None if self.units is None else joint_steps(self.units, 1, self.plan.shards),
            endless=self.units is None,
        )

    def _read_length(self, *, limits: bool) -> None:
        """Read the number of batches. If ``limits`` is true, it also limits later epochs."""
        length = self._dataset.num_batches
        if length is None and not self.plan.steps:
            raise DataError(
                "The PyDataset is endless (num_batches is None), so its epochs never end. Pass "
                "steps_per_epoch (or steps, validation_steps)."
            )
        if length == 0:
            raise DataError("The PyDataset has length 0; expected at least one batch.")
        if limits:
            shards = self.plan.shards
            self._max_units = None if length is None else joint_steps(length, 1, shards) * shards
        self._length = self.units = length
        if length is not None and self._max_units is not None:
            self.units = min(length, self._max_units)

    def _standardize(self, batch: Any) -> Any:
        return batch_structure.standardize(
            batch, self.plan.class_weight, "PyDataset.__getitem__()", max_parts=3
        )

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Call the user's ``on_epoch_begin`` and ``on_epoch_end`` once for each earlier epoch."""
        for _ in range(epochs):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def on_epoch_begin(self, epoch: int) -> None:
        """Call the user's hook. Then the ranks agree on the number and order of batches."""
        plan, units = self.plan, self.units
        self._epoch = epoch
        if not plan.trains:
            # Keras also resets the data for each evaluation.
            self._read_length(limits=True)
            self._dataset.on_epoch_end()
        self._dataset.on_epoch_begin()
        self._read_length(limits=False)
        if plan.trains and plan.steps and self.units != units:
            raise DataError(
                f"The length of the PyDataset must not change if steps_per_epoch is given, got "
                f"{self.units} batches in epoch {epoch} and {units} before; omit steps_per_epoch."
            )
        report = self._report_length()
        if self._may_reorder and plan.compares:
            first = _digest(self._standardize(self._dataset[0]))
            report.content[f"content of the first batch in epoch {epoch}"] = first
        steps = agree(plan.collectives, report, presharded=plan.presharded)
        if (self.units, steps) != (units, self.steps):
            self.set_steps(steps)

    def on_epoch_end(self) -> None:
        """Call the user's ``on_epoch_end``."""
        self._dataset.on_epoch_end()

    def _whole_pass(self) -> HostBatches:
        return self._make(lambda: Position(epoch=self._epoch), self.steps)

    def _rest_of_pass(self, position: Position, steps: int | None, repeatable: bool) -> HostBatches:
        return self._make(lambda: position, steps)

    def _make(self, position_of_pass: Callable[[], Position], steps: int | None) -> HostBatches:
        def shares() -> Iterator[Share]:
            indices, count = self._indices(position_of_pass(), steps)
            for step, batch in enumerate(map(self._standardize, _fetch(self._dataset, indices))):
                rows = batch_structure.count_rows(batch) if step < count else 0
                yield Share(batch, rows, JOINT_ROWS_UNKNOWN)

        return HostBatches(shares, self._spec, num_batches=steps, reads_ahead=True)

    def _indices(self, position: Position, steps: int | None) -> tuple[Iterable[int], float]:
        """Return the index of this rank's batch in each step, and the number of steps that count.

        A step that does not count has rows = 0. The rank computes with a batch in such a step, but
        the result is not used.
        """
        rank, size = self.plan.shard, self.plan.shards
        if self._length is None or steps is None:
            endless = itertools.chain(position.missed, itertools.count(position.start))
            return itertools.islice(endless, rank, None, size), math.inf
        order = epoch_order(
            self._length,
            shuffle=self._shuffle,
            joint_batch=1,
            seed=self.plan.seed,
            epoch=position.epoch,
        )[: self.units]
        indices = remaining_units(order, position)[rank::size].tolist()
        padding = [int(order[-1])] * (steps - len(indices))
        return indices + padding, len(indices)


def _digest(batch: Any) -> str:
    return batch_structure.digest(batch_structure.identifying_leaves(batch))


_dataset_of_worker: Any = None


def _set_dataset_of_worker(dataset: Any) -> None:
    global _dataset_of_worker
    _dataset_of_worker = dataset


def _batch_of_worker(index: int) -> Any:
    return _dataset_of_worker[index]


def _fetch(dataset: keras.utils.PyDataset, indices: Iterable[int]) -> Iterator[Any]:
    """Yield the batches at ``indices``, which the dataset's workers prepare.

    Each pass over the data starts new workers, as in Keras. Only new worker processes see the
    changes that methods such as ``on_epoch_end`` have made to the dataset.
    """
    workers, processes = dataset.workers, dataset.use_multiprocessing
    if workers <= (0 if processes else 1):
        # The dataset may fill the same arrays again for the next batch, which is read ahead.
        for index in indices:
            yield keras.tree.map_structure(batch_structure.copy_of_leaf, dataset[index])
        return
    if processes:
        # Unlike multiprocessing.Pool, this detects that a worker has died.
        pool: Executor = ProcessPoolExecutor(
            workers, initializer=_set_dataset_of_worker, initargs=(dataset,)
        )
        fetch: Any = _batch_of_worker
    else:
        pool, fetch = ThreadPoolExecutor(workers), dataset.__getitem__
    limit = max(1, dataset.max_queue_size)
    pending: collections.deque[Future[Any]] = collections.deque()
    try:
        for index in indices:
            pending.append(pool.submit(fetch, index))
            if len(pending) >= limit:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # If the pass is abandoned, don't wait for a batch in progress.
        pool.shutdown(wait=False, cancel_futures=True)
