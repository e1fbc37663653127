"""Inspection of ``tf.data`` pipelines, and reading them several times in a reproducible order.

Reading all elements of a pipeline once is called a pass. Each new iterator of a pipeline with
``shuffle(seed=...)`` draws the order of its pass from a random generator. Drawing advances the
generator, so the order of a pass depends on the number of earlier passes. A process that resumes
with pass ``e`` first starts the ``e`` earlier passes, as cheaply as possible.

Starting the same pass again is harder, because a second iterator would draw the next order. The
state of the first iterator is therefore saved before its first element is read. If a new iterator
of the same dataset restores that state, it has the same order. Restoring also resets the random
generator, so that the next pass has the right order too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.private_api.tensorflow import (
    cache_file,
    captured_tensors,
    function_graphs,
    input_datasets,
    is_nondeterministic,
    iterator_resource,
    reshuffles,
    variant_tensor,
)
from hvdtrain.trainer.data.tensorflow.datasets import without_autotuning

__all__ = ["PipelinePasses", "cache_files", "shuffles", "unordered_operations"]

_IGNORE_EXTERNAL_STATE = 1  # tf.data's ExternalStatePolicy: nothing leaves the process
_UNORDERED = {"deterministic": b"false", "sloppy": True}
_COUNT = "_hvdtrain_passes_begun"

# A dataset that reads from a shuffled dataset draws the order when it creates the iterator of its
# input. The iterators of these kinds of datasets create it immediately.
_KINDS_AT_ONCE = (
    "_AssertCardinalityDataset _BatchDataset _DenseToRaggedDataset _FilterDataset _FlatMapDataset "
    "_IgnoreErrorsDataset _InterleaveDataset _MapDataset _OptionsDataset _PaddedBatchDataset "
    "_ParallelBatchDataset _ParallelInterleaveDataset _ParallelMapDataset _PrefetchDataset "
    "_RebatchDataset _RestructuredDataset _ScanDataset _ShardDataset _SkipDataset _TakeDataset "
    "_TakeWhileDataset _UnbatchDataset _UniqueDataset _WindowDataset _ZipDataset"
)
_DRAW_AT_ONCE = frozenset(_KINDS_AT_ONCE.split())
# The iterators of these kinds create it when their first element is read.
_DRAW_AT_FIRST = frozenset({"_ShuffleDataset"})
# The iterators of these kinds create it later, or not in every pass. The saved state of an iterator
# includes that.
_DRAW_LATER = frozenset({"CacheDataset", "_CacheDataset", "_RepeatDataset"})

_undecorated = tf.autograph.experimental.do_not_convert


def _all_parts(dataset: Any) -> Iterator[Any]:
    yield dataset
    for part in input_datasets(dataset):
        yield from _all_parts(part)


def _function_bodies(dataset: Any) -> Iterator[Any]:
    """Yield the ``NodeDef`` messages of each function that a dataset calls."""
    for graph in function_graphs(dataset):
        definition = graph.as_graph_def()
        yield definition.node
        yield from (function.node_def for function in definition.library.function)


def _graph_nodes(dataset: Any) -> Any:
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant_tensor(dataset), external_state_policy=_IGNORE_EXTERNAL_STATE
    )
    return tf.compat.v1.GraphDef.FromString(graph.numpy()).node


def cache_files(dataset: Any) -> list[str]:
    """Return the files that ``Dataset.cache`` would write.

    Existing files are not included, because ``Dataset.cache`` only reads them. If a function of the
    pipeline computes a file name, that file is not included either, because its name is unknown.
    """
    names = set()
    for part in _all_parts(dataset):
        names.add(cache_file(part))
        for nodes in _function_bodies(part):
            names |= _cached_by_operations(nodes)
    paths = [name if "://" in name else os.path.abspath(name) for name in names if name]
    return sorted(path for path in paths if not tf.io.gfile.exists(f"{path}.index"))


def _cached_by_operations(nodes: Iterable[Any]) -> set[str]:
    constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    names = set()
    for node in nodes:
        name = constants.get(node.input[1].split(":")[0]) if "CacheDataset" in node.op else None
        if name is not None:
            names.add(tf.make_ndarray(name).item().decode())
    return names


def unordered_operations(dataset: Any) -> list[str]:
    """Return the names of the pipeline's operations with the argument ``deterministic=False``.

    This argument takes precedence over ``tf.data.Options``.
    """
    operations = set()
    for part in _all_parts(dataset):
        kind = type(part).__name__
        unordered = is_nondeterministic(part)
        if unordered is None and ("Interleave" in kind or "Parallel" in kind):
            unordered = any(map(_is_unordered, _graph_nodes(part)))
        if unordered:
            operations.add(kind)
        for nodes in _function_bodies(part):
            operations |= {node.op for node in nodes if _is_unordered(node)}
    return sorted({name.strip("_").split("Dataset")[0] for name in operations})


def _is_unordered(node: Any) -> bool:
    if "Interleave" not in node.op and "Parallel" not in node.op:
        return False
    return any(
        name in node.attr and value in (node.attr[name].s, node.attr[name].b)
        for name, value in _UNORDERED.items()
    )


def shuffles(dataset: Any) -> bool:
    """Return whether the dataset contains a shuffle, as far as its parts can be inspected."""
    return any(type(part).__name__ == "_ShuffleDataset" for part in _all_parts(dataset))


def _reshuffling_paths(dataset: Any, above: frozenset[str] = frozenset()) -> list[frozenset[str]]:
    """Find the parts of a dataset whose order may differ between two passes over the dataset.

    Returns:
        An entry for each such part: the kinds of the datasets that read from it, directly or
        indirectly. A part that can't be inspected also gets an entry, to which "unknown" is added.
    """
    kind = type(dataset).__name__
    through = above | {kind}
    paths = []
    if kind == "_ShuffleDataset" and reshuffles(dataset):
        paths.append(above)
    elif _is_unknown(dataset, kind):
        paths.append(through | {"unknown"})
    for part in input_datasets(dataset):
        paths += _reshuffling_paths(part, through)
    return paths


def _is_unknown(dataset: Any, kind: str) -> bool:
    if kind == "_VariantDataset":
        # Dataset.enumerate uses such a dataset to count. Any other may hide a pipeline.
        return not _only_counts(dataset)
    return reshuffles(dataset) or any(t.dtype == tf.variant for t in captured_tensors(dataset))


def _only_counts(dataset: Any) -> bool:
    spec = dataset.element_spec
    if not isinstance(spec, tf.TensorSpec) or spec.dtype != tf.int64 or spec.shape.rank != 0:
        return False
    return {node.op for node in _graph_nodes(dataset)} <= {"Const", "RangeDataset", "_Retval"}


class PipelinePasses:
    """Reads a user's dataset several times during one training. Each time is called a pass.

    The number of passes is stored in the dataset, because its random generators advance with every
    pass. Another ``fit`` with the same dataset therefore continues with the next order, as in
    Keras.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        paths = _reshuffling_paths(dataset)
        self.changes = bool(paths)  # whether the order of the elements may change from pass to pass
        # whether creating an iterator is enough to draw the next order
        self.at_once = all(above <= _DRAW_AT_ONCE for above in paths)
        # Whether reading one element is enough to draw the next order. Otherwise the pass must be
        # read to its end.
        self.at_first = all(above <= _DRAW_AT_ONCE | _DRAW_AT_FIRST for above in paths)
        # whether the saved state of an iterator determines the order of its pass
        self.repeatable = all(above <= _DRAW_AT_ONCE | _DRAW_LATER for above in paths)
        self._epoch: int | None = None  # the epoch of the last pass that was started
        self._started_after: int | None = None  # the number of passes started up to that pass
        self._saved: Any = None

    @property
    def _started(self) -> int:
        return getattr(self._dataset, _COUNT, 0)

    @_started.setter
    def _started(self, count: int) -> None:
        setattr(self._dataset, _COUNT, count)

    def catch_up(self, passes: int) -> None:
        """Advance the dataset as if ``passes`` passes over it had been started.

        Raises:
            DataError: If more passes were started already, or if earlier passes can't be repeated.
        """
        if not self.changes:
            return
        if passes < self._started:
            raise DataError(
                f"Training must resume with pass {passes} over a tf.data pipeline that has a "
                f"different order in each pass, but {self._started} passes were already started in "
                "this process. Create the dataset again, or resume in a new process."
            )
        endless = self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if passes > self._started and endless and not self.at_first:
            raise DataError(
                f"Pass {passes} over an endless tf.data pipeline can't be started: the order of "
                "its shuffle depends on how much of the earlier passes was read. Use a single pass "
                "for all epochs."
            )
        for _ in range(self._started, passes):
            iterator = iter(without_autotuning(self._dataset))
            if self.at_once:
                continue
            for _ in iterator:
                if self.at_first:
                    break
        self._started = passes

    def begin(self, epoch: int, *, within: bool, repeatable: bool) -> tf.data.Dataset:
        """Return a dataset with all elements of one pass, which can be iterated once.

        Args:
            epoch: The epoch of the pass. If this is the epoch of the latest pass, the latest pass
                is started again. If this is a later epoch, the next pass is started.
            within: Whether training continues in the middle of the pass. If so, and if ``catch_up``
                was not called before, one earlier pass is assumed for each earlier epoch.
            repeatable: Whether it must be possible to start this pass again later.

        Raises:
            DataError: If the pass must be started again, but its order can't be restored.
        """
        if not self.changes:
            return self._dataset
        again = self._epoch is not None and epoch <= self._epoch
        if again and (
            self._saved is None or epoch != self._epoch or self._started != self._started_after
        ):
            raise DataError(
                f"The pass of epoch {epoch} over the tf.data pipeline can't be started again, "
                "because the pipeline has a different order in each pass. Use "
                "Dataset.shuffle(..., reshuffle_each_iteration=False); or shuffle only once and "
                "not within a function; or pass arrays or a keras.utils.PyDataset, which hvdtrain "
                "shuffles."
            )
        if within and self._epoch is None and not self._started:
            self.catch_up(epoch)
        if not again:
            self._started = self._started_after = self._started + 1
            self._epoch, self._saved = epoch, None
        if not again and not (repeatable and self.repeatable):
            return self._dataset
        iterator = iter(without_autotuning(self._dataset))
        if again:
            tf.raw_ops.DeserializeIterator(
                resource_handle=iterator_resource(iterator), serialized=self._saved
            )
        else:
            self._saved = tf.raw_ops.SerializeIterator(
                resource_handle=iterator_resource(iterator),
                external_state_policy=_IGNORE_EXTERNAL_STATE,
            )
        return _remaining_elements(iterator)


def _remaining_elements(iterator: Any) -> tf.data.Dataset:
    """Return a dataset with the elements that an iterator has not yielded yet."""
    ticks = tf.data.Dataset.range(1).repeat()
    elements = ticks.map(_undecorated(lambda _: iterator.get_next_as_optional()))
    elements = elements.take_while(_undecorated(lambda element: element.has_value()))
    return elements.map(_undecorated(lambda element: element.get_value()))
