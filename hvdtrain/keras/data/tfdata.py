"""``tf.data`` pipelines: every rank runs the whole of it and keeps every N-th batch.

Joint step ``k`` on N ranks is made of the batches ``kN`` to ``kN + N - 1``; rank ``r`` computes
with the ``r``-th of them. That needs no knowledge of what is inside the pipeline, and every rank
can count the rows of all of them, so nothing has to be communicated.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data import adapters, structures
from hvdtrain.keras.data.agreement import REMEDIES, raise_if_different
from hvdtrain.keras.data.base import JOINT_ROWS_UNKNOWN, Report, ShardedInput, ShardPlan

__all__ = ["NOTICE", "ShardedPipeline", "TfDataSource"]

NOTICE = (
    "Every rank runs the whole tf.data pipeline and keeps its part of the batches. If reading or "
    "preparing the data is what takes the time, shard the source, dataset.shard(hvdtrain.size(), "
    "hvdtrain.rank()) before the costly steps, and tell hvdtrain with presharded=True."
)

_undecorated = tf.autograph.experimental.do_not_convert


class TfDataSource:
    """A dataset of batches, each of the size that one rank is to compute with.

    Args:
        dataset: Elements x, (x,), (x, y) or (x, y, sample_weight), nested, batched.
        class_weight: As in ``fit``.
        plan: How to share out.
    """

    def __init__(self, dataset: tf.data.Dataset, *, class_weight: Any, plan: ShardPlan) -> None:
        self._plan = plan
        if class_weight is not None:
            dataset = _weighted(dataset, class_weight)
        self._dataset = dataset
        self._spec = structures.as_tuple(dataset.element_spec)
        _check_batched(self._spec)
        cardinality = int(dataset.cardinality())
        self._endless = cardinality == tf.data.INFINITE_CARDINALITY
        self._batches = cardinality if cardinality >= 0 else None

    def report(self) -> Report:
        """Element types and the number of batches; what is in them shows when it runs."""
        plan = self._plan
        if self._endless and not plan.steps:
            raise DataError(
                "The dataset is endless, so an epoch has no end. Pass steps_per_epoch (or steps, "
                "validation_steps), or leave out Dataset.repeat()."
            )
        if self._batches == 0 and not plan.presharded:
            raise DataError("The dataset has no batches; expected at least one.")
        structure = {"kind of input": "a tf.data.Dataset", "steps": plan.steps}
        structure.update(structures.signature(self._spec))
        amount = "endless" if self._endless else self._batches
        steps = None if self._batches is None else -(-self._batches // plan.shards)
        return Report(
            structure=structure,
            content={"number of batches": "unknown" if amount is None else amount},
            steps=steps,
            endless=self._endless,
        )

    def shard(self, steps: int | None) -> ShardedPipeline:
        """This rank's batches."""
        return ShardedPipeline(self, self._plan, steps)

    def dataset(self, steps: int | None, record: Any) -> tf.data.Dataset:
        """Elements (batch, rows, joint_rows) of one pass.

        Args:
            steps: Joint steps to yield, or None where unknown or endless; those beyond this
                rank's data have rows = 0.
            record: Called before the first and before the last step of a pass with a digest of
                the stream so far, the number of the step, and whether it is the last; or None.
        """
        padding = 0
        if self._plan.presharded and steps is not None and self._batches is not None:
            padding = steps - self._batches
        with tf.device("CPU:0"):
            if self._plan.shards == 1 and not padding:
                dataset = self._dataset.map(_undecorated(self._whole_batch))
            else:
                dataset = self._joint_steps(padding, record)
            if steps is not None:
                dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
            options = tf.data.Options()
            options.deterministic = True
            return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _whole_batch(self, *element: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """A step that is one batch of this rank: nothing to choose and nothing to add up."""
        tensors, rows, _, _ = self._prepare(False, *element)
        unknown = tf.constant(JOINT_ROWS_UNKNOWN, tf.int32)
        return self._pack(tensors), rows, unknown if self._plan.presharded else rows

    def _joint_steps(self, padding: int, record: Any) -> tf.data.Dataset:
        plan = self._plan
        joint = _JointSteps(
            rank=plan.shard,
            size=plan.shards,
            blanks=_components([structures.blank(spec) for spec in self._present(self._spec)]),
            padded=self._batches == 0,
        )
        dataset = self._dataset.map(
            _undecorated(lambda *element: self._prepare(record is not None, *element))
        )
        # The first end gives out the last step that holds a batch, if there is any.
        dataset = joint.apply(dataset, ends=padding + (self._batches != 0))
        return dataset.map(_undecorated(lambda *step: self._element(record, *step)))

    def _pack(self, components: tuple[tf.Tensor, ...]) -> Any:
        specs = self._present(self._spec)
        leaves = iter(tf.nest.pack_sequence_as(specs, components, expand_composites=True))
        return keras.tree.map_structure(
            lambda spec: None if structures.is_absent(spec) else next(leaves), self._spec
        )

    @staticmethod
    def _present(batch: tuple[Any, ...]) -> list[Any]:
        return [leaf for leaf in keras.tree.flatten(batch) if not structures.is_absent(leaf)]

    def _prepare(self, digests: bool, *element: Any) -> tuple[Any, ...]:
        # tf.data spreads a tuple over the arguments, even one of a single entry.
        spread = type(self._dataset.element_spec) is tuple
        batch = structures.as_tuple(element if spread else element[0])
        leaves = self._present(batch)
        recognised = structures.targets_first(batch)
        print_ = structures.digest(recognised) if digests else tf.zeros([8], tf.uint8)
        return _components(leaves), structures.count_rows(leaves[0]), print_, True

    def _element(
        self,
        record: Any,
        _: tf.Tensor,
        components: tuple[tf.Tensor, ...],
        rows: tf.Tensor,
        joint_rows: tf.Tensor,
        step: tf.Tensor,
        last: tf.Tensor,
        stream: tf.Tensor,
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        batch = self._pack(components)
        if self._plan.presharded:
            return batch, rows, tf.constant(JOINT_ROWS_UNKNOWN, tf.int32)
        if record is not None:

            def tell() -> tf.Tensor:
                with tf.control_dependencies([tf.numpy_function(record, [stream, step, last], [])]):
                    return tf.identity(rows)

            rows = tf.cond(tf.equal(step, 0) | last, tell, lambda: rows)
        return batch, rows, joint_rows


class _JointSteps:
    """Turns a stream of batches into joint steps, of which this rank keeps its batch.

    A joint step is given out when the batch after it has come, or the end: so the last one knows
    that it is the last. Only one batch is held, whatever the number of ranks.
    """

    def __init__(
        self, *, rank: int, size: int, blanks: tuple[tf.Tensor, ...], padded: bool
    ) -> None:
        self._rank = rank
        self._size = size
        self._blanks = blanks
        self._padded = padded

    def apply(self, dataset: tf.data.Dataset, *, ends: int) -> tf.data.Dataset:
        """One element for each batch to one for each joint step.

        From (tensors, rows, digest, True) to (True, tensors, rows, joint_rows, step, last, digest).

        Args:
            dataset: One element for each batch; the True tells it from an end.
            ends: Marks to put at the end; each gives out a joint step, from the second on with
                rows = 0. Where there is no batch, they do so only if ``padded``.
        """
        no_print = tf.zeros([8], tf.uint8)
        zero = tf.constant(0, tf.int32)
        end = tf.data.Dataset.from_tensors((self._blanks, zero, no_print, False))
        dataset = dataset.concatenate(end.repeat(ends))
        # batches in the joint step, this rank's batch, its rows, joint rows, steps given, digest
        state = (zero, self._blanks, zero, zero, tf.constant(0, tf.int64), no_print)
        dataset = dataset.scan(state, _undecorated(self._next))
        return dataset.filter(_undecorated(lambda ready, *_: ready))

    def _next(self, state: tuple[Any, ...], element: tuple[Any, ...]) -> tuple[Any, Any]:
        count, kept, rows, joint_rows, step, stream = state
        tensors, batch_rows, batch_print, is_batch = element
        whole = tf.equal(count, self._size)
        ready = tf.where(is_batch, whole, (count > 0) | (step > 0) | self._padded)
        given = (ready, kept, rows, joint_rows, step, ~is_batch, stream)
        position = tf.where(whole, 0, count)
        mine = is_batch & (position <= self._rank)
        kept = tf.cond(mine, lambda: tensors, lambda: kept)
        before = tf.where(tf.equal(position, 0), 0, rows)
        rows = tf.where(tf.equal(position, self._rank), batch_rows, before)
        joint_rows = tf.where(whole, 0, joint_rows) + batch_rows
        new_state = (
            tf.where(is_batch, position + 1, 0),
            kept,
            tf.where(is_batch, rows, 0),
            tf.where(is_batch, joint_rows, 0),
            step + tf.cast(ready, tf.int64),
            structures.chain(stream, batch_print),  # of no more use after an end
        )
        return new_state, given


class ShardedPipeline(ShardedInput):
    """One rank's batches of a pipeline; compares what the ranks' pipelines yield."""

    def __init__(self, source: TfDataSource, plan: ShardPlan, steps: int | None) -> None:
        self._collectives = plan.collectives
        self._compares = plan.size > 1 and not plan.presharded
        self._first: str | None = None
        self._whole: str | None = None
        super().__init__(
            source.dataset(steps, self._record if self._compares else None),
            steps=steps,
            joint_rows_known=not plan.presharded,
            notice=NOTICE if self._compares else None,
        )

    def _record(self, stream: Any, step: Any, last: Any) -> None:
        text = stream.tobytes().hex()
        if step == 0:
            self._first, self._whole = text, None
        if last:
            self._whole = text

    def verify(self) -> None:
        """Compare the streams: their first joint step, and all of a pass that is complete."""
        if not self._compares:
            return
        mine = {"first": self._first, "whole": self._whole}
        seen = self._collectives.allgather_object(mine, name="content of the tf.data pipeline")
        facts = [{"the first joint step (fingerprint)": entry["first"]} for entry in seen]
        # A rank that has not fetched its last step yet has nothing to compare.
        if all(entry["whole"] for entry in seen):
            for fact, entry in zip(facts, seen):
                fact["a whole pass (fingerprint)"] = entry["whole"]
        raise_if_different(facts, remedies=REMEDIES)


def _components(leaves: list[Any]) -> tuple[tf.Tensor, ...]:
    """Dense tensors that make up the leaves; ``Dataset.scan`` can't hold ragged ones."""
    return tuple(tf.nest.flatten(leaves, expand_composites=True))


def _weighted(dataset: tf.data.Dataset, class_weight: Any) -> tf.data.Dataset:
    spec = structures.as_tuple(dataset.element_spec)
    if len(spec) < 2 or spec[1] is None:
        raise DataError(
            "class_weight was given with a dataset without targets. Expected elements (x, y)."
        )
    return dataset.map(adapters.class_weight_map(class_weight))


def _check_batched(spec: tuple[Any, ...]) -> None:
    """Raise if the components can't be batches of one size."""
    sizes: dict[int, str] = {}
    for name, leaf in zip(structures.leaf_names(spec), keras.tree.flatten(spec)):
        if structures.is_absent(leaf):
            continue
        structures.blank(leaf)
        if leaf.shape.rank == 0:
            raise DataError(
                f"The dataset isn't batched: {name} is a single value per element. Call "
                "Dataset.batch(n), n being the rows that one rank takes per step."
            )
        if leaf.shape.rank is not None and leaf.shape[0] is not None:
            sizes.setdefault(leaf.shape[0], name)
    if len(sizes) > 1:
        found = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise DataError(
            f"The first dimensions of the dataset's components differ: {found}. Expected the "
            "same number of rows in all; if the dataset isn't batched, call Dataset.batch(n), n "
            "being the rows that one rank takes per step."
        )
