"""Python generators: each rank reads its own, which ends when it ends.

Nobody knows beforehand how many batches a generator has. So the ranks ask each other before each
block of steps of ``fit``, and one that has no batch left takes part with nothing until none has.
A generator is read once: what an epoch leaves is for the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data.batch_structure import present
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.python_batches import (
    EXAMINED_BATCHES,
    signature_of,
    standardize,
    to_dataset,
)
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import ShardedInput
from hvdtrain.private_api import keras as private_keras

__all__ = ["GeneratorSource", "ShardedGenerator"]

Batch = Any  # as Keras passes it to a step


class GeneratorSource:
    """Batches that come one after another."""

    unit = "batches"
    units: int | None = None
    each = 1

    def __init__(self, generator: Generator[Any, Any, Any], plan: ShardPlan) -> None:
        self.plan = plan
        batches = (standardize(batch, plan.class_weight, "A generator") for batch in generator)
        examined = list(itertools.islice(batches, EXAMINED_BATCHES))
        if not examined:
            raise DataError(
                "The generator has no batch (left); expected at least one on every rank. A "
                "generator can be read once: make a new one for each fit, evaluate or predict."
            )
        self.example = examined[0]
        self.specs = private_keras.specs_of_batches([present(batch) for batch in examined])
        self.queue = _Queue(itertools.chain(examined, batches))

    def report(self) -> InputReport:
        """Types and shapes of the batches; how many there are shows at their end."""
        plan = self.plan
        if plan.steps is None and not plan.trains:
            raise DataError(
                "How many batches a generator has is not known beforehand. Pass validation_steps "
                "to fit, or steps to evaluate and predict."
            )
        structure = {"kind of input": "a generator", "steps": plan.steps}
        structure.update(signature_of(self.example, self.specs))
        # As with an endless input there is nothing to compare.
        return InputReport(structure=structure, endless=True)

    def shard(self, steps: int | None) -> ShardedGenerator:
        """This rank's batches: all of its generator."""
        return ShardedGenerator(self)


class ShardedGenerator(ShardedInput):
    """One rank's batches, and then batches that don't count as long as others have some."""

    def __init__(self, source: GeneratorSource) -> None:
        self._generator = source
        self._agreed = 0  # steps of this pass that all ranks take
        super().__init__(
            source, lambda: self._elements(endless=True), steps=None, joint_rows_known=False
        )

    def _dataset_from(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        """Read up to ``position`` first: where training is resumed the generator begins anew."""
        queue = self._generator.queue
        while queue.taken < position.start and queue.take() is not None:
            pass
        self._agreed = 0
        return self._elements(endless=False)

    def agree_on_steps(self, block: int) -> int:
        """Return how many of the next ``block`` steps some rank has a batch for; collective."""
        mine = np.array(self._generator.queue.available(block), np.int64)
        steps = int(self._generator.plan.collectives.allreduce(mine, "max", name="batches left"))
        self._agreed += steps
        return steps

    def _elements(self, *, endless: bool) -> tf.data.Dataset:
        source = self._generator

        def elements() -> Iterator[tuple[Any, ...]]:
            given = 0
            while endless or given < self._agreed:
                batch = source.queue.take()
                leaves = present(source.example if batch is None else batch)
                rows = 0 if batch is None else int(leaves[0].shape[0])
                yield (*leaves, np.int32(rows))
                given += 1

        # Not prefetched: what the ranks have not agreed on yet would look like the end.
        return to_dataset(elements, source.example, source.specs, None)


class _Queue:
    """Batches that were looked at and not yet taken, and one more that is being made meanwhile."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.taken = 0
        self._batches = batches
        self._waiting: list[Batch] = []
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1)
        self._next: Future[Batch | None] | None = None

    def available(self, most: int) -> int:
        """Return the number of batches that there are, ``most`` at most."""
        while len(self._waiting) < most and self._look():
            pass
        return min(len(self._waiting), most)

    def take(self) -> Batch | None:
        """Take the next batch; None where there is none."""
        if not self.available(1):
            return None
        self.taken += 1
        batch = self._waiting.pop(0)
        if self._pool is not None and self._next is None:
            self._next = self._pool.submit(next, self._batches, None)
        return batch

    def _look(self) -> bool:
        if self._pool is None:
            return False
        ahead, self._next = self._next, None
        batch = next(self._batches, None) if ahead is None else ahead.result()
        if batch is None:
            self._pool.shutdown(wait=False)
            self._pool = None
            return False
        self._waiting.append(batch)
        return True
