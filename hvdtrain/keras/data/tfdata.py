"""``tf.data`` pipelines: every rank runs the whole of it and keeps every N-th batch.

Joint step ``k`` on N ranks is made of the batches ``kN`` to ``kN + N - 1``; rank ``r`` computes
with the ``r``-th of them. That needs no knowledge of what is inside the pipeline, and every rank
can count the rows of all of them, so nothing has to be communicated.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data import batch_structure
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.dataset_options import untuned
from hvdtrain.keras.data.input_agreement import REMEDIES, raise_if_different
from hvdtrain.keras.data.joint_stream import join_steps
from hvdtrain.keras.data.partition import joint_steps
from hvdtrain.keras.data.pipeline_operations import cache_files, unordered_operations
from hvdtrain.keras.data.pipeline_passes import PipelinePasses, shuffles
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan
from hvdtrain.keras.data.sharded_input import JOINT_ROWS_UNKNOWN, ShardedInput, Share
from hvdtrain.private_api import keras as private_keras

__all__ = ["ShardedPipeline", "TfDataSource"]

_NOTICE = (
    "Every rank runs the whole tf.data pipeline and keeps its part of the batches. If reading or "
    "preparing the data is what takes the time, shard the source, dataset.shard(hvdtrain.size(), "
    "hvdtrain.rank()) before the costly steps, and tell hvdtrain with presharded=True."
)

_undecorated = tf.autograph.experimental.do_not_convert
_PASSES = "_hvdtrain_whole_passes"


class StreamRecord:
    """Digests of what a pass has read of its stream: up to its first step, and all of it."""

    def __init__(self) -> None:
        self.first: str | None = None
        self.whole: str | None = None

    def note(self, stream: np.ndarray, step: np.ndarray, last: np.ndarray) -> None:
        """Note a digest; the pipeline calls it before the first and before the last step of a pass.

        Args:
            stream: A digest of the stream so far.
            step: The number of the step.
            last: Whether it is the last.
        """
        text = stream.tobytes().hex()
        if step == 0:
            self.first, self.whole = text, None
        if last:
            self.whole = text


class TfDataSource:
    """A dataset of batches, each of the size that one rank is to compute with.

    Args:
        dataset: Its elements are batches of any structure.
    """

    unit = "batches"
    each = 1

    def __init__(self, dataset: tf.data.Dataset, plan: ShardPlan) -> None:
        self.plan = plan
        self.passes = PipelinePasses(dataset)
        self.shuffles = shuffles(dataset)
        self._given = dataset
        self._dataset = dataset = self._weighted(dataset)
        self._spec = dataset.element_spec
        _check_batched(self._spec)
        cardinality = int(dataset.cardinality())
        self._endless = cardinality == tf.data.INFINITE_CARDINALITY
        self.units = cardinality if cardinality >= 0 else None

    @property
    def compares(self) -> bool:
        """Whether all ranks are to read the same stream."""
        return self.plan.size > 1 and not self.plan.presharded

    def report(self) -> InputReport:
        """Element types and the number of batches; what is in them shows when it runs."""
        plan = self.plan
        if self._endless and not plan.steps:
            raise DataError(
                "The dataset is endless, so an epoch has no end. Pass steps_per_epoch (or steps, "
                "validation_steps), or leave out Dataset.repeat()."
            )
        if self.units == 0 and not plan.presharded:
            raise DataError("The dataset has no batches; expected at least one.")
        if self.compares and (unordered := unordered_operations(self._given)):
            raise DataError(
                "The tf.data pipeline yields its elements in an order that differs between ranks, "
                f"got deterministic=False in {', '.join(unordered)}; leave it out, or give every "
                "rank data of its own (Dataset.shard) and pass presharded=True to "
                "hvdtrain.distribute."
            )
        structure = {"kind of input": "a tf.data.Dataset", "steps": plan.steps}
        structure.update(batch_structure.signature(self._spec))
        amount = "endless" if self._endless else self.units
        steps = None if self.units is None else joint_steps(self.units, 1, plan.shards)
        return InputReport(
            structure=structure,
            content={"number of batches": "unknown" if amount is None else amount},
            steps=steps,
            endless=self._endless,
            written_files=cache_files(self._given) if plan.size > 1 else [],
        )

    def shard(self, steps: int | None) -> ShardedPipeline:
        """This rank's batches."""
        return ShardedPipeline(self, steps)

    def whole_pass(self, steps: int | None) -> tuple[tf.data.Dataset, StreamRecord]:
        """A pass from the start, in whatever order the pipeline has when it is iterated.

        It is kept with the user's dataset: to make it again takes most of what one more ``fit``
        costs.
        """
        plan = self.plan
        key = (plan.rank, plan.size, plan.presharded, plan.trains, steps)
        kept = vars(self._given).setdefault(_PASSES, {}) if plan.class_weight is None else {}
        if key not in kept:
            record = StreamRecord()
            kept[key] = self._elements(self._dataset, self.units, steps, record), record
        dataset, record = kept[key]
        return dataset, record

    def pass_from(
        self, position: Position, steps: int | None, record: StreamRecord, *, repeatable: bool
    ) -> tf.data.Dataset | None:
        """Return the rest of a pass from ``position`` on; the pipeline runs from its start.

        None where that is the whole pass, in the order that the pipeline has next.
        """
        with tf.device("CPU:0"):
            within = position.start > 0
            dataset = self.passes.begin(position.epoch, within=within, repeatable=repeatable)
            if dataset is self._given and not within and not position.missed:
                return None
            dataset = self._weighted(dataset)
            if position.missed:
                dataset = _only_left(dataset, position)
            elif position.start:
                dataset = dataset.skip(position.start)
        left = None if self.units is None else position.left_of(self.units)
        return self._elements(dataset, left, steps, record)

    def _weighted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self.plan.class_weight is None:
            return dataset
        parts = batch_structure.parts(dataset.element_spec)
        if len(parts) < 2 or batch_structure.is_absent(parts[1]):
            raise DataError(
                "class_weight was given with a dataset without targets. Expected elements (x, y)."
            )
        return dataset.map(private_keras.class_weight_map(self.plan.class_weight))

    def _elements(
        self, dataset: tf.data.Dataset, batches: int | None, steps: int | None, record: StreamRecord
    ) -> tf.data.Dataset:
        """Make the shares of one pass.

        Args:
            dataset: This rank's data as the user's elements.
            batches: How many they are; None where unknown or endless.
            steps: Joint steps to yield, or None where unknown or endless; those beyond this
                rank's data have rows = 0.
            record: Is told what is read, where ranks are to compare it.
        """
        padding = 0
        if self.plan.presharded and steps is not None and batches is not None:
            padding = steps - batches
        with tf.device("CPU:0"):
            if self.plan.shards == 1 and not padding:
                dataset = dataset.map(_undecorated(self._whole_batch))
            else:
                dataset = self._joint_steps(dataset, batches, padding, record)
            if steps is not None:
                dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
            return untuned(dataset).prefetch(tf.data.AUTOTUNE)

    def _whole_batch(self, *element: Any) -> Share:
        """A step that is one batch of this rank: nothing to choose and nothing to add up."""
        tensors, rows, _, _ = self._prepare(False, *element)
        unknown = tf.constant(JOINT_ROWS_UNKNOWN, tf.int32)
        return Share(self._pack(tensors), rows, unknown if self.plan.presharded else rows)

    def _joint_steps(
        self, dataset: tf.data.Dataset, batches: int | None, padding: int, record: StreamRecord
    ) -> tf.data.Dataset:
        specs = batch_structure.present(self._spec)
        dataset = dataset.map(_undecorated(lambda *element: self._prepare(self.compares, *element)))
        dataset = join_steps(
            dataset,
            rank=self.plan.shard,
            size=self.plan.shards,
            blanks=_components([batch_structure.blank(spec) for spec in specs]),
            # The first end gives out the last step that holds a batch, if there is any.
            ends=padding + (batches != 0),
            padded=batches == 0,
        )
        return dataset.map(_undecorated(lambda *step: self._element(record, *step)))

    def _pack(self, components: tuple[tf.Tensor, ...]) -> Any:
        specs = batch_structure.present(self._spec)
        leaves = tf.nest.pack_sequence_as(specs, components, expand_composites=True)
        return batch_structure.refill(self._spec, leaves)

    def _prepare(self, digests: bool, *element: Any) -> tuple[Any, ...]:
        # tf.data spreads a tuple over the arguments, even one of a single entry.
        spread = type(self._dataset.element_spec) is tuple
        batch = element if spread else element[0]
        leaves = batch_structure.present(batch)
        recognised = batch_structure.targets_first(batch)
        print_ = batch_structure.digest(recognised) if digests else tf.zeros([8], tf.uint8)
        return _components(leaves), batch_structure.count_rows(leaves[0]), print_, True

    def _element(
        self,
        record: StreamRecord,
        _: tf.Tensor,
        components: tuple[tf.Tensor, ...],
        rows: tf.Tensor,
        joint_rows: tf.Tensor,
        step: tf.Tensor,
        last: tf.Tensor,
        stream: tf.Tensor,
    ) -> Share:
        batch = self._pack(components)
        if self.plan.presharded:
            return Share(batch, rows, tf.constant(JOINT_ROWS_UNKNOWN, tf.int32))
        if self.compares:

            def tell() -> tf.Tensor:
                noted = tf.numpy_function(record.note, [stream, step, last], [])
                with tf.control_dependencies([noted]):
                    return tf.identity(rows)

            rows = tf.cond(tf.equal(step, 0) | last, tell, lambda: rows)
        return Share(batch, rows, joint_rows)


class ShardedPipeline(ShardedInput):
    """One rank's batches of a pipeline; compares what the ranks' pipelines yield."""

    def __init__(self, source: TfDataSource, steps: int | None) -> None:
        plan = source.plan
        self._pipeline = source
        self._collectives = plan.collectives
        self._record = StreamRecord()
        super().__init__(
            source,
            functools.partial(self._whole_pass, steps),
            steps=steps,
            joint_rows_known=not plan.presharded,
            notice=_NOTICE if source.compares else None,
        )

    def _whole_pass(self, steps: int | None) -> tf.data.Dataset:
        dataset, self._record = self._pipeline.whole_pass(steps)
        return dataset

    def _dataset_from(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        left = self._pipeline.pass_from(position, steps, self._record, repeatable=repeatable)
        return self.dataset if left is None else left

    @property
    def repeatable(self) -> bool:
        """Whether the order of a pass can be restored."""
        return self._pipeline.passes.repeatable

    @property
    def follows_global_seed(self) -> bool:
        """Whether the pipeline shuffles."""
        return self._pipeline.shuffles

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Draw the orders of the passes before."""
        self._pipeline.passes.catch_up(passes)

    def verify(self) -> None:
        """Compare the streams: their first joint step, and all of a pass that is complete."""
        if not self._pipeline.compares:
            return
        mine = {"first": self._record.first, "whole": self._record.whole}
        seen = self._collectives.allgather_object(mine, name="content of the tf.data pipeline")
        facts = [{"the first joint step (fingerprint)": entry["first"]} for entry in seen]
        # A rank that has not fetched its last step yet has nothing to compare.
        if all(entry["whole"] for entry in seen):
            for fact, entry in zip(facts, seen):
                fact["a whole pass (fingerprint)"] = entry["whole"]
        raise_if_different(facts, remedies=REMEDIES)


def _only_left(dataset: tf.data.Dataset, position: Position) -> tf.data.Dataset:
    """A stream without what is done; what was missed comes first, as it lies before the rest."""
    missed = tf.constant(position.missed, tf.int64)

    def is_left(place: tf.Tensor, *_: Any) -> tf.Tensor:
        return (place >= position.start) | tf.reduce_any(tf.equal(place, missed))

    left = dataset.enumerate().filter(_undecorated(is_left))
    return left.map(_undecorated(lambda _, element: element))


def _components(leaves: list[Any]) -> tuple[tf.Tensor, ...]:
    """Dense tensors that make up the leaves; ``Dataset.scan`` can't hold ragged ones."""
    return tuple(tf.nest.flatten(leaves, expand_composites=True))


def _check_batched(spec: Any) -> None:
    """Raise if the components can't be batches of one size."""
    sizes: dict[int, str] = {}
    for name, leaf in zip(batch_structure.leaf_names(spec), keras.tree.flatten(spec)):
        if batch_structure.is_absent(leaf):
            continue
        batch_structure.blank(leaf)
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
