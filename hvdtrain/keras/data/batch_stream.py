"""Batches that come one after another: Python generators, torch's DataLoader, Grain's datasets.

Every rank reads the same stream and keeps its batch of each joint step. With ``presharded=True``
each rank reads a stream of its own. Ranks that don't know its length agree before each block of
steps of ``fit`` whether any of them has a batch left; the others compute with rows = 0 meanwhile.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data import batch_structure
from hvdtrain.keras.data.batch_structure import fingerprint, present, targets_first
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.input_agreement import REMEDIES, raise_if_different
from hvdtrain.keras.data.partition import joint_steps
from hvdtrain.keras.data.python_batches import (
    EXAMINED_BATCHES,
    signature_of,
    standardize,
    to_dataset,
)
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import JOINT_ROWS_UNKNOWN, ShardedInput
from hvdtrain.private_api import keras as private_keras

__all__ = ["ShardedStream", "StreamSource", "stream_kind"]

logger = logging.getLogger(__package__)

Batch = Any  # as Keras passes it to a step

_NOTICE = (
    "Every rank reads all batches of the %s and keeps its part of them. If making batches is what "
    "takes the time, let each rank make its own and pass presharded=True; or use a PyDataset."
)


def stream_kind(x: Any) -> str | None:
    """Return the name of a kind of stream, or None if ``x`` is something else."""
    if isinstance(x, types.GeneratorType):
        return "generator"
    if private_keras.is_torch_dataloader(x):
        return "torch DataLoader"
    return "Grain dataset" if private_keras.is_grain_dataset(x) else None


class _Step(NamedTuple):
    """A joint step, as this rank reads it.

    Attributes:
        batch: This rank's batch; None if the stream ended before it.
        joint_rows: Rows of all batches of the step.
        digest: Of the stream up to here, uint8 of shape (8,); None if it isn't compared.
    """

    batch: Batch | None
    joint_rows: int
    digest: Any


class StreamSource:
    """An iterable of batches. A generator can be read once; the others begin again in each pass."""

    unit = "batches"
    each = 1

    def __init__(self, batches: Iterable[Any], plan: ShardPlan) -> None:
        self.plan = plan
        self.kind = stream_kind(batches) or "iterable"
        self.units = private_keras.length_of_dataloader(batches)
        self.read_once = isinstance(batches, Iterator)
        self._batches = batches
        examining = self._standardized()
        examined = list(itertools.islice(examining, EXAMINED_BATCHES))
        if not examined:
            raise DataError(
                f"The {self.kind} has no batches; expected at least one on every rank."
                + (f" {_READ_ONCE}" if self.read_once else "")
            )
        self._unread = itertools.chain(examined, examining)
        self.example = examined[0]
        self.specs = private_keras.specs_of_batches([present(batch) for batch in examined])

    @property
    def compares(self) -> bool:
        """Whether all ranks are to read the same stream."""
        return self.plan.size > 1 and not self.plan.presharded

    def report(self) -> InputReport:
        """Types and shapes of the batches, and a fingerprint of the first."""
        plan = self.plan
        if plan.collectives.survives_losses:
            raise DataError(
                f"A {self.kind} can't be used in an elastic job (--elastic): its batches can't be "
                "read again after a rank was lost. Use arrays, a tf.data.Dataset or a PyDataset; "
                "or --max-restarts instead of --elastic."
            )
        if plan.presharded and plan.steps is None and not plan.trains and self.units is None:
            raise DataError(
                f"The number of batches of a {self.kind} is unknown, and with presharded=True it "
                "may differ between ranks. Pass validation_steps to fit, or steps to evaluate and "
                "predict."
            )
        structure = {"kind of input": f"a {self.kind}", "steps": plan.steps}
        structure.update(signature_of(self.example, self.specs))
        return InputReport(
            structure=structure,
            content={
                "number of batches": "unknown" if self.units is None else self.units,
                "content of the first batch": fingerprint(targets_first(self.example)),
            },
            steps=None if self.units is None else joint_steps(self.units, 1, plan.shards),
            endless=self.units is None,
        )

    def shard(self, steps: int | None) -> ShardedStream:
        """This rank's batches."""
        return ShardedStream(self, steps)

    def drop_pass(self) -> None:
        """Read a pass and drop it, so that the random state behind its order advances."""
        collections.deque(self._batches, maxlen=0)

    def steps_from(self, start: int) -> Iterator[_Step]:
        """Yield the joint steps after the first ``start`` batches of a pass."""
        rank, ranks = self.plan.shard, self.plan.shards
        batches = self._unread if self.read_once else self._standardized()
        mine, place, joint_rows = None, 0, 0
        so_far = tf.zeros([8], tf.uint8) if self.compares else None
        for batch in itertools.islice(batches, start, None):
            if place == rank:
                mine = batch
            joint_rows += _rows(batch)
            if so_far is not None:
                with tf.device("CPU:0"):
                    recognised = batch_structure.digest(targets_first(batch))
                    so_far = batch_structure.chain(so_far, recognised)
            place += 1
            if place == ranks:
                yield _Step(mine, joint_rows, so_far)
                mine, place, joint_rows = None, 0, 0
        if place:
            yield _Step(mine, joint_rows, so_far)

    def _standardized(self) -> Iterator[Batch]:
        maker = f"A {self.kind}"
        return (standardize(batch, self.plan.class_weight, maker) for batch in self._batches)


class ShardedStream(ShardedInput):
    """One rank's batches of a stream; compares what the ranks read."""

    def __init__(self, source: StreamSource, steps: int | None) -> None:
        plan = source.plan
        self._stream = source
        self._queue: _Queue | None = None
        self._agreed = 0  # steps of this pass that all ranks take
        self._taken = 0
        self._digest: Any = None
        super().__init__(
            source,
            lambda: self._elements(lambda: math.inf if steps is None else steps, begins=True),
            steps=steps,
            joint_rows_known=not plan.presharded,
            notice=_NOTICE % source.kind if source.compares else None,
        )
        # Else all ranks reach the end of the stream in the same step.
        self._fills_up = plan.presharded or steps is not None

    def _dataset_from(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        if position.start and self._stream.plan.rank == 0:
            logger.warning(
                "Training resumes within a pass over its data: the first %d batches of the %s are "
                "read and dropped. This is right only if it yields the same batches in the same "
                "order as before.",
                position.start,
                self._stream.kind,
            )
        self._begin(position.start)
        self._agreed = 0 if steps is None else steps
        return self._elements(lambda: self._agreed, begins=False)

    def _begin(self, start: int) -> _Queue:
        if self._queue is None or not self._stream.read_once:
            self._queue = _Queue(self._stream.steps_from(start))
            self._taken, self._digest = 0, None
        return self._queue

    def agree_on_steps(self, block: int) -> int:
        """Return how many of the next ``block`` steps some rank has a batch for; collective."""
        assert self._queue is not None
        steps = self._joint_maximum(self._queue.available(block))
        self._agreed += steps
        return steps

    def _joint_maximum(self, count: int) -> int:
        plan = self._stream.plan
        if not plan.presharded:
            return count
        return int(plan.collectives.allreduce(np.array(count), "max", name="batches left"))

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Read the passes before."""
        if not self._stream.read_once:
            for _ in range(passes):
                self._stream.drop_pass()

    def on_epoch_begin(self, epoch: int) -> None:
        """Check that there is something left to read.

        Raises:
            DataError: A generator has ended; on every rank.
        """
        if self._queue is None or not self._stream.read_once:
            return
        if not self._joint_maximum(self._queue.available(1)):
            raise DataError(
                f"The {self._stream.kind} has no batch left for another epoch. {_READ_ONCE} Or "
                "pass steps_per_epoch (validation_steps), so that several epochs share its batches."
            )

    def verify(self) -> None:
        """Compare the streams as far as they were read."""
        if not self._stream.compares:
            return
        content = None if self._digest is None else self._digest.numpy().tobytes().hex()
        facts = {"number of steps": self._taken, "content of the batches": content}
        seen = self._stream.plan.collectives.allgather_object(facts, name="content of the stream")
        raise_if_different(seen, remedies=REMEDIES)

    def on_epoch_end(self) -> None:
        """Compare the streams, and leave the user's generator alone until the next epoch."""
        self.verify()
        if self._queue is not None:
            self._queue.settle()

    def _elements(self, limit: Callable[[], float], *, begins: bool) -> tf.data.Dataset:
        """Make a dataset of shares.

        Args:
            limit: Returns the number of elements, which may grow meanwhile.
            begins: Whether each iteration is a pass of its own.
        """
        source = self._stream

        def elements() -> Iterator[tuple[Any, ...]]:
            queue = self._begin(0) if begins else self._queue
            assert queue is not None
            given = 0
            while given < limit():
                step = queue.take()
                if step is None and not self._fills_up:
                    return
                batch = None if step is None else step.batch
                if step is not None:
                    self._taken += 1
                    self._digest = step.digest
                rows = 0 if batch is None else _rows(batch)
                joint_rows = 0 if step is None else step.joint_rows
                yield (
                    *present(source.example if batch is None else batch),
                    np.int32(rows),
                    np.int32(JOINT_ROWS_UNKNOWN if source.plan.presharded else joint_rows),
                )
                given += 1

        # Not prefetched: what the ranks have not agreed on yet would look like the end.
        return to_dataset(elements, source.example, source.specs, self.steps if begins else None)


_READ_ONCE = (
    "A generator can be read once: make a new one for each fit, evaluate or predict, or use a "
    "PyDataset."
)


def _rows(batch: Batch) -> int:
    return int(present(batch)[0].shape[0])


class _Queue:
    """Steps that were read and not yet taken, and one more that is being made meanwhile."""

    def __init__(self, steps: Iterator[_Step]) -> None:
        self._steps = steps
        self._waiting: list[_Step] = []
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1)
        self._next: Future[_Step | None] | None = None

    def available(self, most: int) -> int:
        """Return the number of steps that are left, at most ``most``."""
        while len(self._waiting) < most and self._read():
            pass
        return min(len(self._waiting), most)

    def take(self) -> _Step | None:
        """Take the next step; None at the end."""
        if not self.available(1):
            return None
        step = self._waiting.pop(0)
        if self._pool is not None and self._next is None:
            self._next = self._pool.submit(next, self._steps, None)
        return step

    def settle(self) -> None:
        """Wait for the step that is being made."""
        if self._next is not None:
            self._read()

    def _read(self) -> bool:
        if self._pool is None:
            return False
        ahead, self._next = self._next, None
        step = next(self._steps, None) if ahead is None else ahead.result()
        if step is None:
            self._pool.shutdown(wait=False)
            self._pool = None
            return False
        self._waiting.append(step)
        return True
