"""Input that is a stream of batches: a Python generator, torch ``DataLoader`` or Grain dataset.

Every rank reads the whole stream, and uses one batch of it in each step. With two ranks, rank 0
uses the batches 0, 2, 4, and so on. With ``presharded=True`` each rank reads a different stream,
and uses all its batches. If the lengths of these streams are unknown, the ranks find out before
each block of steps of ``fit`` whether any rank has a batch left. Ranks without a batch then compute
with rows = 0.
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

import keras
import numpy as np

from hvdtrain.data.input_agreement import REMEDIES, InputReport, raise_if_different
from hvdtrain.data.partition import Position, joint_steps
from hvdtrain.errors import DataError
from hvdtrain.private_api import keras_data
from hvdtrain.trainer.data import batch_structure
from hvdtrain.trainer.data.batch_structure import (
    copy_of_leaf,
    count_rows,
    digest,
    identifying_leaves,
)
from hvdtrain.trainer.data.host_batches import JOINT_ROWS_UNKNOWN, HostBatches, Share
from hvdtrain.trainer.data.sharded_input import ShardedInput, ShardPlan

__all__ = ["ShardedStream", "stream_kind"]

logger = logging.getLogger(__package__)

Batch = Any  # as Keras passes it to a step

_NOTICE = (
    "Every rank reads all batches of the %s and keeps its part of them. If making batches is the "
    "bottleneck, let each rank make different batches and pass presharded=True, or use a PyDataset."
)
_READ_ONCE = (
    "A generator can be read only once. Create one for each fit, evaluate or predict, or use a "
    "PyDataset."
)


def stream_kind(x: Any) -> str | None:
    """Return the name of the kind of stream that ``x`` is, or None if ``x`` is not a stream."""
    if isinstance(x, types.GeneratorType):
        return "generator"
    if keras_data.is_torch_dataloader(x):
        return "torch DataLoader"
    return "Grain dataset" if keras_data.is_grain_dataset(x) else None


class _Step(NamedTuple):
    """A step that all ranks take together, as this rank reads it from the stream."""

    batch: Batch | None  # This rank's batch. None if the stream ended before this batch.
    joint_rows: int  # the number of rows in the batches of all ranks in this step
    # The digest of the stream up to this step. Empty if the ranks don't compare their streams.
    digest: str


class ShardedStream(ShardedInput):
    """One rank's share of a stream of batches.

    A generator is read only once: the next epoch continues where the last one stopped. Other
    streams are read again from their start in each pass over the data.
    """

    def __init__(self, batches: Iterable[Any], plan: ShardPlan) -> None:
        super().__init__(plan)
        self._kind = stream_kind(batches) or "iterable"
        self.units = keras_data.length_of_dataloader(batches)
        self.joint_rows_known = not plan.presharded
        self.notice = _NOTICE % self._kind if plan.compares else None
        self._read_once = isinstance(batches, Iterator)
        self._batches = batches
        standardized = self._standardized()
        examined = list(itertools.islice(standardized, batch_structure.EXAMINED_BATCHES))
        if not examined:
            raise DataError(
                f"The {self._kind} yields no batches; expected at least one on every rank."
                + (f" {_READ_ONCE}" if self._read_once else "")
            )
        # Other streams are read again from the start. An open iterator would keep the worker
        # processes of a DataLoader.
        first = itertools.chain(examined, standardized)
        self._unread: Iterator[Batch] = first if self._read_once else iter(())
        self._example = examined[0]
        self._spec = batch_structure.batch_spec(examined)

    def report(self) -> InputReport:
        """Report the types and shapes of the batches, and a digest of the first batch."""
        plan = self.plan
        if plan.collectives.survives_losses:
            raise DataError(
                f"A {self._kind} can't be used in an elastic job (--elastic), because its batches "
                "can't be read again when a rank is lost. Use arrays, a tf.data.Dataset or a "
                "PyDataset, or --max-restarts instead of --elastic."
            )
        if plan.presharded and plan.steps is None and not plan.trains and self.units is None:
            raise DataError(
                f"The number of batches of a {self._kind} is unknown, and with presharded=True it "
                "may differ between ranks. Pass validation_steps to fit, or steps to evaluate and "
                "predict."
            )
        return InputReport(
            structure={
                "kind of input": f"a {self._kind}",
                "steps": plan.steps,
                **batch_structure.signature(self._spec),
            },
            content={
                "number of batches": "unknown" if self.units is None else self.units,
                "content of the first batch": digest(identifying_leaves(self._example)),
            },
            steps=None if self.units is None else joint_steps(self.units, 1, plan.shards),
            endless=self.units is None,
        )

    def set_steps(self, steps: int | None) -> None:
        """Set how many steps all ranks take together in one pass over the data.

        Passes that were started before can't be read any more.
        """
        super().set_steps(steps)
        self._queue: _Queue | None = None
        self._agreed_steps = 0  # steps of this pass that all ranks have agreed on
        self._steps_read = 0
        self._digest = ""

    def _whole_pass(self) -> HostBatches:
        limit = math.inf if self.steps is None else self.steps
        return self._make(lambda: self._start_pass(0), lambda: limit, self.steps)

    def _rest_of_pass(self, position: Position, steps: int | None, repeatable: bool) -> HostBatches:
        if position.start and self.plan.rank == 0:
            logger.warning(
                "Resuming within a pass over the data: the first %d batches of the %s are read and "
                "dropped. This is exact only if it yields the same batches in the same order as "
                "before.",
                position.start,
                self._kind,
            )
        queue = self._start_pass(position.start)
        self._agreed_steps = 0 if steps is None else steps
        return self._make(lambda: queue, lambda: self._agreed_steps, None)

    def _start_pass(self, start: int) -> _Queue:
        if self._queue is None or not self._read_once:
            self._queue = _Queue(self._joint_steps(start))
            self._steps_read, self._digest = 0, ""
        return self._queue

    def _make(
        self,
        start: Callable[[], _Queue],
        limit: Callable[[], float],
        steps: int | None,
    ) -> HostBatches:
        """Make this rank's share of each step.

        ``start`` is called when the result is iterated. The result of ``limit``, the maximum number
        of steps, may grow while steps are read.
        """
        # Without padding, the stream ends in the same step on all ranks.
        pads = self.plan.presharded or self.steps is not None

        def shares() -> Iterator[Share]:
            queue = start()
            count = 0
            while count < limit():
                step = queue.take()
                if step is None and not pads:
                    return
                batch, rows, joint_rows = self._example, 0, 0
                if step is not None:
                    self._steps_read += 1
                    self._digest = step.digest
                    joint_rows = step.joint_rows
                    if step.batch is not None:
                        batch, rows = step.batch, count_rows(step.batch)
                yield Share(batch, rows, JOINT_ROWS_UNKNOWN if self.plan.presharded else joint_rows)
                count += 1

        # Don't read ahead, because a step that the ranks haven't agreed on yet would look like the
        # end of the data.
        return HostBatches(shares, self._spec, num_batches=steps, reads_ahead=False)

    def _joint_steps(self, start: int) -> Iterator[_Step]:
        """Yield a ``_Step`` for each step, after skipping the first ``start`` batches of a pass."""
        rank, ranks = self.plan.shard, self.plan.shards
        batches = self._unread if self._read_once else self._standardized()
        own_batch, place, joint_rows, stream = None, 0, 0, ""
        for batch in itertools.islice(batches, start, None):
            if place == rank:
                own_batch = batch
            joint_rows += count_rows(batch)
            if self.plan.compares:
                stream = digest(identifying_leaves(batch), before=stream)
            place += 1
            if place == ranks:
                yield _Step(own_batch, joint_rows, stream)
                own_batch, place, joint_rows = None, 0, 0
        if place:
            yield _Step(own_batch, joint_rows, stream)

    def _standardized(self) -> Iterator[Batch]:
        source, class_weight = f"A {self._kind}", self.plan.class_weight
        batches = (batch_structure.standardize(b, class_weight, source) for b in self._batches)
        # A generator may use the same memory for the next batch, which is read ahead.
        return (
            (keras.tree.map_structure(copy_of_leaf, b) for b in batches)
            if self._read_once
            else batches
        )

    def agree_on_steps(self, block: int) -> int:
        """Return for how many of the next ``block`` steps at least one rank has a batch.

        All ranks must call this.
        """
        assert self._queue is not None
        steps = self._joint_maximum(self._queue.available(block))
        self._agreed_steps += steps
        return steps

    def _joint_maximum(self, count: int) -> int:
        if not self.plan.presharded:
            return count
        return int(self.plan.collectives.allreduce(np.array(count), "max", name="batches left"))

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Read and discard earlier passes, which advances the random state of the order."""
        if not self._read_once:
            for _ in range(passes):
                collections.deque(self._batches, maxlen=0)

    def on_epoch_begin(self, epoch: int) -> None:
        """If the stream is a generator, check that at least one rank has a batch left."""
        if self._queue is None or not self._read_once:
            return
        if not self._joint_maximum(self._queue.available(1)):
            raise DataError(
                f"The {self._kind} ended before another epoch. {_READ_ONCE} Or pass "
                "steps_per_epoch (validation_steps), so that several epochs share its batches."
            )

    def verify(self) -> None:
        """Check that all ranks have read the same batches so far."""
        if not self.plan.compares:
            return
        facts = {"number of steps": self._steps_read, "content of the batches": self._digest}
        gathered = self.plan.collectives.allgather_object(facts, name="content of the stream")
        raise_if_different(gathered, remedies=REMEDIES)

    def on_epoch_end(self) -> None:
        """Check that all ranks have read the same batches in this epoch.

        The user's generator is not read any more until the next epoch.
        """
        self.verify()
        if self._queue is not None:
            self._queue.settle()


class _Queue:
    """Steps that were read from the stream but not used yet. A thread reads the next step."""

    def __init__(self, steps: Iterator[_Step]) -> None:
        self._steps = steps
        self._waiting: list[_Step] = []
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1)
        self._next: Future[_Step | None] | None = None

    def available(self, limit: int) -> int:
        """Return the number of steps that are left, or ``limit`` if there are more."""
        while len(self._waiting) < limit and self._read():
            pass
        return min(len(self._waiting), limit)

    def take(self) -> _Step | None:
        """Remove and return the next step, or return None at the end of the stream."""
        if not self.available(1):
            return None
        step = self._waiting.pop(0)
        if self._pool is not None and self._next is None:
            self._next = self._pool.submit(next, self._steps, None)
        return step

    def settle(self) -> None:
        """Wait until the thread has read the next step."""
        if self._next is not None:
            self._read()

    def _read(self) -> bool:
        if self._pool is None:
            return False
        pending, self._next = self._next, None
        step = next(self._steps, None) if pending is None else pending.result()
        if step is None:
            self._pool.shutdown(wait=False)
            self._pool = None
            return False
        self._waiting.append(step)
        return True
