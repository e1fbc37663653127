"""Passes over a ``tf.data`` pipeline, each in the order that it has in an uninterrupted training.

A pipeline that holds ``shuffle(seed=...)`` draws the order of a pass from a generator when it makes
an iterator, and the generator goes on. So the order depends on how many passes were begun before:
a process that resumes with pass ``e`` begins ``e`` others first, as cheaply as the pipeline allows.

A second iterator for one pass would draw the next order. To begin a pass again, the state of its
first iterator is kept from before its first element; restoring it in another iterator of the same
dataset restores the seeds that it drew, and the generator, so that the next pass is right, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data.dataset_options import untuned
from hvdtrain.private_api.tensorflow import (
    captured_by,
    draws_anew,
    iterator_resource,
    parts_of,
    variant_of,
)

__all__ = ["PipelinePasses", "Reshuffling", "reshuffling", "shuffles"]

_IGNORE_EXTERNAL_STATE = 1  # ExternalStatePolicy of tf.data: what is kept never leaves the process
_COUNT = "_hvdtrain_passes_begun"

# Datasets whose iterator makes those of its inputs once, when it is made itself.
_KINDS_AT_ONCE = (
    "_AssertCardinalityDataset _BatchDataset _DenseToRaggedDataset _FilterDataset _FlatMapDataset "
    "_IgnoreErrorsDataset _InterleaveDataset _MapDataset _OptionsDataset _PaddedBatchDataset "
    "_ParallelBatchDataset _ParallelInterleaveDataset _ParallelMapDataset _PrefetchDataset "
    "_RebatchDataset _RestructuredDataset _ScanDataset _ShardDataset _SkipDataset _TakeDataset "
    "_TakeWhileDataset _UnbatchDataset _UniqueDataset _WindowDataset _ZipDataset"
)
_DRAW_AT_ONCE = frozenset(_KINDS_AT_ONCE.split())
# These make them when their first element is asked for.
_DRAW_AT_FIRST = frozenset({"_ShuffleDataset"})
# These make them later, or not in every pass; their own state tells which.
_DRAW_LATER = frozenset({"CacheDataset", "_CacheDataset", "_RepeatDataset"})

_undecorated = tf.autograph.experimental.do_not_convert


@dataclass(frozen=True, kw_only=True)
class Reshuffling:
    """The changes of a pipeline's order from pass to pass.

    Attributes:
        changes: It may change at all.
        at_once: Making an iterator is enough to go on to the next pass.
        at_first: Reading an element of it is enough; else the pass must be read to its end.
        repeatable: A saved iterator holds all that the order of its pass depends on.
    """

    changes: bool
    at_once: bool
    at_first: bool
    repeatable: bool


def reshuffling(dataset: Any) -> Reshuffling:
    """Look at a dataset and all that it is made of; what is unknown counts as changing."""
    seen = _look(dataset, frozenset())
    return Reshuffling(
        changes=bool(seen),
        at_once=all(above <= _DRAW_AT_ONCE for above in seen),
        at_first=all(above <= _DRAW_AT_ONCE | _DRAW_AT_FIRST for above in seen),
        repeatable=all(above <= _DRAW_AT_ONCE | _DRAW_LATER for above in seen),
    )


def shuffles(dataset: Any) -> bool:
    """Whether a part of the dataset that can be seen shuffles, be it always alike."""
    kind = type(dataset).__name__
    return kind == "_ShuffleDataset" or any(map(shuffles, parts_of(dataset)))


def _look(dataset: Any, above: frozenset[str]) -> list[frozenset[str]]:
    """Return for each part that may change the order the kinds of datasets that lie above it."""
    kind = type(dataset).__name__
    through = above | {kind}
    found = []
    if kind == "_ShuffleDataset" and draws_anew(dataset):
        found.append(above)
    elif _is_unknown(dataset, kind):
        found.append(through | {"unknown"})
    for part in parts_of(dataset):
        found += _look(part, through)
    return found


def _is_unknown(dataset: Any, kind: str) -> bool:
    if kind == "_VariantDataset":
        # Dataset.enumerate counts with one; any other may hide whatever it was made of.
        return not _only_counts(dataset)
    return draws_anew(dataset) or any(t.dtype == tf.variant for t in captured_by(dataset))


def _only_counts(dataset: Any) -> bool:
    spec = dataset.element_spec
    if not isinstance(spec, tf.TensorSpec) or spec.dtype != tf.int64 or spec.shape.rank != 0:
        return False
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant_of(dataset), external_state_policy=_IGNORE_EXTERNAL_STATE
    )
    operations = {node.op for node in tf.compat.v1.GraphDef.FromString(graph.numpy()).node}
    return operations <= {"Const", "RangeDataset", "_Retval"}


class PipelinePasses:
    """The passes of one training over a user's dataset.

    The count of all passes that were begun stays with the dataset, as its generators do: another
    ``fit`` with the same dataset goes on with the order after the last, as in Keras.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._order = reshuffling(dataset)
        self.repeatable = self._order.repeatable
        """Whether passes can be begun again."""
        self._epoch: int | None = None  # of the pass begun last
        self._next: int | None = None  # its number and 1
        self._saved: Any = None

    @property
    def _begun(self) -> int:
        return getattr(self._dataset, _COUNT, 0)

    @_begun.setter
    def _begun(self, count: int) -> None:
        setattr(self._dataset, _COUNT, count)

    def catch_up(self, passes: int) -> None:
        """Let the next pass be number ``passes`` over this dataset, counted from 0.

        Raises:
            DataError: That one was begun already, or can't be reached.
        """
        if not self._order.changes:
            return
        if passes < self._begun:
            raise DataError(
                f"Training goes on with pass {passes} over a tf.data pipeline of which this "
                f"process has begun {self._begun}, and the pipeline has another order in each. "
                "Make the dataset anew, or resume in a new process."
            )
        endless = self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if passes > self._begun and endless and not self._order.at_first:
            raise DataError(
                f"Pass {passes} over an endless tf.data pipeline can't be begun: the order of its "
                "shuffle depends on how far the passes before were read. Expected one pass, 0, "
                "that goes on through all epochs."
            )
        for _ in range(self._begun, passes):
            iterator = iter(untuned(self._dataset))
            if self._order.at_once:
                continue
            for _ in iterator:
                if self._order.at_first:
                    break
        self._begun = passes

    def begin(self, epoch: int, *, within: bool, repeatable: bool) -> tf.data.Dataset:
        """The elements of a pass from its start, to be iterated once.

        Args:
            epoch: Names the pass: the same again is the same pass, a later one the next.
            within: The pass goes on in its middle. If it was not begun here nor ``catch_up``
                called, every epoch before is taken for a pass.
            repeatable: Be ready to begin it again, if the pipeline allows that.

        Raises:
            DataError: The pipeline can't go back to the order of this pass.
        """
        if not self._order.changes:
            return self._dataset
        again = self._epoch is not None and epoch <= self._epoch
        if again and (self._saved is None or epoch != self._epoch or self._begun != self._next):
            raise DataError(
                f"The pass of epoch {epoch} over the tf.data pipeline can't be begun again: the "
                f"pipeline has another order in each pass. {_REMEDY}"
            )
        if within and self._epoch is None and not self._begun:
            self.catch_up(epoch)
        if not again:
            self._begun = self._next = self._begun + 1
            self._epoch, self._saved = epoch, None
        if not again and not (repeatable and self._order.repeatable):
            return self._dataset
        iterator = iter(untuned(self._dataset))
        if again:
            tf.raw_ops.DeserializeIterator(
                resource_handle=iterator_resource(iterator), serialized=self._saved
            )
        else:
            self._saved = tf.raw_ops.SerializeIterator(
                resource_handle=iterator_resource(iterator),
                external_state_policy=_IGNORE_EXTERNAL_STATE,
            )
        return _elements_of(iterator)


_REMEDY = (
    "Use Dataset.shuffle(..., reshuffle_each_iteration=False); or shuffle in the pipeline itself "
    "and once, rather than twice or in a dataset within a function; or pass arrays or a "
    "keras.utils.PyDataset, which hvdtrain shuffles."
)


def _elements_of(iterator: Any) -> tf.data.Dataset:
    """Make a dataset of the rest of an iterator; in the graph, so without the cost of Python."""
    turns = tf.data.Dataset.range(1).repeat()
    elements = turns.map(_undecorated(lambda _: iterator.get_next_as_optional()))
    elements = elements.take_while(_undecorated(lambda element: element.has_value()))
    return elements.map(_undecorated(lambda element: element.get_value()))
