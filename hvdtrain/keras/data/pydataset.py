"""``keras.utils.PyDataset``: each rank asks the user's object for its own batches only."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data.batch_structure import fingerprint, present, targets_first
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.input_agreement import agree
from hvdtrain.keras.data.partition import epoch_order, joint_steps, units_left
from hvdtrain.keras.data.python_batches import (
    EXAMINED_BATCHES,
    signature_of,
    standardize,
    to_dataset,
)
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import JOINT_ROWS_UNKNOWN, ShardedInput
from hvdtrain.private_api import keras as private_keras

__all__ = ["PyDatasetSource", "ShardedPyDataset"]


class PyDatasetSource:
    """An object that makes batch number ``i`` when asked."""

    unit = "batches"
    each = 1

    def __init__(self, dataset: keras.utils.PyDataset, plan: ShardPlan) -> None:
        self.dataset = dataset
        self.plan = plan
        # As in Keras, a pass is no longer than the first, even when the data gets longer.
        self.units: int | None = None
        self._length: int | None = None
        self._most: int | None = None
        self._shuffle = bool(plan.shuffle)
        self._examined: list[Any] = []
        self._specs: list[tf.TypeSpec] = []

    def report(self) -> InputReport:
        """Number, types and shapes of the batches, and a fingerprint of the first."""
        plan = self.plan
        self._limit_units()
        count = min(EXAMINED_BATCHES, self.units or EXAMINED_BATCHES)
        self._examined = [self.standardize(self.dataset[index]) for index in range(count)]
        self._specs = private_keras.specs_of_batches([present(b) for b in self._examined])
        report = InputReport(
            structure={
                "kind of input": "a PyDataset",
                "steps": plan.steps,
                **signature_of(self._examined[0], self._specs),
            },
            content={
                **self._content(),
                "shuffle": self._shuffle,
                "seed": plan.seed,
                "content of the first batch": fingerprint(targets_first(self._examined[0])),
            },
            steps=self._steps(),
            endless=self.units is None,
        )
        if plan.trains:
            self.dataset.on_epoch_end()  # as Keras does before the first epoch
        return report

    def report_epoch(self, epoch: int, *, examine: bool) -> InputReport:
        """Call the user's hook; report the batches and, to ``examine`` their order, the first."""
        trains, before = self.plan.trains, self.units
        if not trains:
            # Keras resets what it evaluates each time.
            self._limit_units()
            self.dataset.on_epoch_end()
        self.dataset.on_epoch_begin()
        self._count()
        if trains and self.plan.steps and self.units != before:
            raise DataError(
                f"The length of the PyDataset can't change where steps_per_epoch is given, got "
                f"{self.units} batches in epoch {epoch} after {before}; leave steps_per_epoch out."
            )
        content = self._content()
        if examine:
            first = fingerprint(targets_first(self.standardize(self.dataset[0])))
            content[f"content of the first batch in epoch {epoch}"] = first
        return InputReport(content=content, steps=self._steps(), endless=self.units is None)

    def _limit_units(self) -> None:
        """Let the next epochs have at most as many steps as an epoch would have now."""
        self._most = None
        self._count()
        steps = self._steps()
        self._most = None if steps is None else steps * self.plan.shards

    def _count(self) -> None:
        self._length = self.dataset.num_batches
        if self._length is None and not self.plan.steps:
            raise DataError(
                "The PyDataset is endless (num_batches is None), so an epoch has no end. Pass "
                "steps_per_epoch (or steps, validation_steps)."
            )
        if self._length == 0:
            raise DataError("The PyDataset has length 0; expected at least one batch.")
        self.units = self._length
        if self.units is not None and self._most is not None:
            self.units = min(self.units, self._most)

    def _content(self) -> dict[str, Any]:
        return {"number of batches": "endless" if self._length is None else self._length}

    def _steps(self) -> int | None:
        return None if self.units is None else joint_steps(self.units, 1, self.plan.shards)

    def shard(self, steps: int | None) -> ShardedPyDataset:
        """This rank's batches."""
        return ShardedPyDataset(self, steps)

    def standardize(self, batch: Any) -> Any:
        """Return a user's batch as Keras passes it to a step.

        Raises:
            ValueError: Keras doesn't take it.
        """
        return standardize(batch, self.plan.class_weight, "PyDataset.__getitem__()", most_parts=3)

    def indices(self, position: Position, steps: int | None) -> Iterator[tuple[int, bool]]:
        """Yield for each step of a pass the index of this rank's batch, and whether it counts."""
        rank, size = self.plan.shard, self.plan.shards
        if self.units is None or steps is None:
            endless = itertools.chain(position.missed, itertools.count(position.start))
            yield from ((index, True) for index in itertools.islice(endless, rank, None, size))
            return
        assert self._length is not None
        order = epoch_order(
            self._length,
            shuffle=self._shuffle,
            joint_batch=1,
            seed=self.plan.seed,
            epoch=position.epoch,
        )[: self.units]
        left = units_left(order, position)
        for place in range(rank, steps * size, size):
            counts = place < len(left)
            yield int(left[place] if counts else order[-1]), counts

    def elements(self, position: Position, steps: int | None) -> Iterator[tuple[Any, ...]]:
        """Flat batches of this rank, rows and joint_rows, step by step."""
        indices, counts = itertools.tee(self.indices(position, steps))
        batches = _fetch(self.dataset, (index for index, _ in indices))
        for batch, (_, real) in zip(batches, counts):
            leaves = present(self.standardize(batch))
            rows = int(leaves[0].shape[0]) if real else 0
            yield (*leaves, np.int32(rows), np.int32(JOINT_ROWS_UNKNOWN))

    def to_dataset(self, elements: Any, steps: int | None) -> tf.data.Dataset:
        """Make a dataset of shares from the generator function ``elements``."""
        return to_dataset(elements, self._examined[0], self._specs, steps).prefetch(1)


class ShardedPyDataset(ShardedInput):
    """One rank's batches; passes epochs on to the user's object and checks its order."""

    def __init__(self, source: PyDatasetSource, steps: int | None) -> None:
        self._batches = source
        self._epoch = 0
        kind = type(source.dataset)
        self._may_reorder = (
            kind.on_epoch_begin is not keras.utils.PyDataset.on_epoch_begin
            or kind.on_epoch_end is not keras.utils.PyDataset.on_epoch_end
        )
        super().__init__(
            source,
            lambda: source.to_dataset(
                lambda: source.elements(Position(epoch=self._epoch), self.steps), self.steps
            ),
            steps=steps,
            joint_rows_known=False,
        )

    def _dataset_from(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        return self._batches.to_dataset(lambda: self._batches.elements(position, steps), steps)

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Call the hooks of the user's object as often as the epochs before would have."""
        for _ in range(epochs):
            self._batches.dataset.on_epoch_begin()
            self._batches.dataset.on_epoch_end()

    def on_epoch_begin(self, epoch: int) -> None:
        """Call the user's hook, then agree on the number of batches and check their order.

        Raises:
            DataError: Ranks have different batches; on every rank.
        """
        source, plan = self._batches, self._batches.plan
        self._epoch = epoch
        examine = self._may_reorder and plan.size > 1 and not plan.presharded
        report = source.report_epoch(epoch, examine=examine)
        before = self.units, self.steps
        self.units = source.units
        self.steps = agree(plan.collectives, report, presharded=plan.presharded)
        if (self.units, self.steps) != before:
            self.__dict__.pop("dataset", None)

    def on_epoch_end(self) -> None:
        """Tell the user's object."""
        self._batches.dataset.on_epoch_end()


_dataset_of_worker: Any = None


def _set_dataset_of_worker(dataset: Any) -> None:
    global _dataset_of_worker
    _dataset_of_worker = dataset


def _batch_of_worker(index: int) -> Any:
    return _dataset_of_worker[index]


def _fetch(dataset: keras.utils.PyDataset, indices: Iterator[int]) -> Iterator[Any]:
    """The batches at ``indices`` in that order, prepared ahead by as many workers as it asks.

    As in Keras, the workers start anew in each pass, so that processes see what the hooks of the
    user's object have changed.
    """
    workers, processes = dataset.workers, dataset.use_multiprocessing
    if workers <= (0 if processes else 1):
        yield from (dataset[index] for index in indices)
        return
    if processes:
        # Unlike multiprocessing.Pool, this one notices when a worker dies.
        pool: Executor = ProcessPoolExecutor(
            workers, initializer=_set_dataset_of_worker, initargs=(dataset,)
        )
        fetch: Any = _batch_of_worker
    else:
        pool, fetch = ThreadPoolExecutor(workers), dataset.__getitem__
    ahead = max(1, dataset.max_queue_size)
    waiting: collections.deque[Future[Any]] = collections.deque()
    try:
        for index in indices:
            waiting.append(pool.submit(fetch, index))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Reached early when the pass is given up; a batch in the making is left to itself.
        pool.shutdown(wait=False, cancel_futures=True)
