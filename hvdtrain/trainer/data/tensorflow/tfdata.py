"""Input that is a ``tf.data`` pipeline. Every rank runs the pipeline and keeps every N-th batch.

In step ``k``, N ranks together use the batches ``kN`` to ``kN + N - 1``, and rank ``r`` uses the
batch ``kN + r``. This works for any pipeline. It needs no communication, because every rank counts
the rows of all batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.input_agreement import REMEDIES, InputReport, raise_if_different
from hvdtrain.data.partition import Position, joint_steps
from hvdtrain.errors import DataError
from hvdtrain.private_api import keras_tensorflow
from hvdtrain.trainer.data import batch_structure
from hvdtrain.trainer.data.host_batches import JOINT_ROWS_UNKNOWN, Share
from hvdtrain.trainer.data.sharded_input import ShardedInput, ShardPlan
from hvdtrain.trainer.data.tensorflow.datasets import (
    blank_value,
    chain_digests,
    count_rows,
    describe_row,
    digest,
    without_autotuning,
)
from hvdtrain.trainer.data.tensorflow.pipeline import (
    PipelinePasses,
    cache_files,
    shuffles,
    unordered_operations,
)

__all__ = ["ShardedPipeline"]

_NOTICE = (
    "Every rank runs the whole tf.data pipeline and keeps its part of the batches. If reading or "
    "preprocessing is the bottleneck, shard the source before the costly steps with "
    "dataset.shard(hvdtrain.size(), hvdtrain.rank()), and pass presharded=True."
)

_undecorated = tf.autograph.experimental.do_not_convert
_PASSES = "_hvdtrain_whole_passes"


class _StreamRecord:
    """Digests of the batches that were read in one pass over the data."""

    def __init__(self) -> None:
        # the digest of the batches of all ranks in the first step, or None before that step
        self.first: str | None = None
        self.whole: str | None = None  # the digest of all batches, or None before the last step

    def note(self, stream: np.ndarray, step: np.ndarray, last: np.ndarray) -> None:
        """Store the digest of all batches so far, in the first and last step."""
        text = stream.tobytes().hex()
        if step == 0:
            self.first, self.whole = text, None
        if last:
            self.whole = text


class ShardedPipeline(ShardedInput):
    """One rank's share of the batches of a ``tf.data.Dataset``."""

    def __init__(self, dataset: tf.data.Dataset, plan: ShardPlan) -> None:
        super().__init__(plan)
        self.joint_rows_known = not plan.presharded
        self.notice = _NOTICE if plan.compares else None
        self._passes = PipelinePasses(dataset)
        self.repeatable = self._passes.repeatable
        self.follows_global_seed = shuffles(dataset)
        self._user_dataset = dataset
        self._dataset = self._add_class_weights(dataset)
        self._spec = self._dataset.element_spec
        _check_batched(self._spec)
        batch_structure.check_numeric(self._spec)
        cardinality = int(self._dataset.cardinality())
        self._endless = cardinality == tf.data.INFINITE_CARDINALITY
        self.units = cardinality if cardinality >= 0 else None

    def report(self) -> InputReport:
        """Report the types of the elements and the number of batches."""
        plan = self.plan
        if self._endless and not plan.steps:
            raise DataError(
                "The dataset is endless, so its epochs never end. Pass steps_per_epoch (or steps, "
                "validation_steps), or remove Dataset.repeat()."
            )
        if self.units == 0 and not plan.presharded:
            raise DataError("The dataset is empty; expected at least one batch.")
        if plan.compares and (unordered := unordered_operations(self._user_dataset)):
            raise DataError(
                "The tf.data pipeline yields its elements in an order that differs between ranks, "
                f"got deterministic=False in {', '.join(unordered)}; remove it, or shard the data "
                "(Dataset.shard) and pass presharded=True to hvdtrain.distribute."
            )
        amount = "endless" if self._endless else "unknown" if self.units is None else self.units
        return InputReport(
            structure={
                "kind of input": "a tf.data.Dataset",
                "steps": plan.steps,
                **batch_structure.signature(self._spec, describe_row),
            },
            content={"number of batches": amount},
            steps=None if self.units is None else joint_steps(self.units, 1, plan.shards),
            endless=self._endless,
            written_files=cache_files(self._user_dataset) if plan.size > 1 else [],
        )

    def set_steps(self, steps: int | None) -> None:
        """Set how many steps all ranks take together in one pass over the data.

        Passes that were started before can't be read any more.
        """
        super().set_steps(steps)
        self._record = _StreamRecord()

    def _whole_pass(self) -> tf.data.Dataset:
        # Keep the result in the user's dataset, because making it takes most of the time of a
        # second fit.
        plan, steps = self.plan, self.steps
        key = (plan.rank, plan.size, plan.presharded, plan.trains, steps)
        cached = plan.class_weight is None
        kept = vars(self._user_dataset).setdefault(_PASSES, {}) if cached else {}
        if key not in kept:
            record = _StreamRecord()
            kept[key] = self._make(self._dataset, self.units, steps, record), record
        dataset, self._record = kept[key]
        return dataset

    def _rest_of_pass(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        with tf.device("CPU:0"):
            within = position.start > 0
            dataset = self._passes.begin(position.epoch, within=within, repeatable=repeatable)
            if dataset is self._user_dataset and not within and not position.missed:
                return self.dataset
            dataset = self._add_class_weights(dataset)
            if position.missed:
                dataset = _skip_done(dataset, position)
            elif position.start:
                dataset = dataset.skip(position.start)
        left = None if self.units is None else position.left_of(self.units)
        return self._make(dataset, left, steps, self._record)

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Advance the pipeline's random generators as earlier passes over the data would have."""
        self._passes.catch_up(passes)

    def verify(self) -> None:
        """Check that all ranks have read the same batches in the first step.

        If all ranks have read their data to the end, the batches of all steps are compared.
        """
        if not self.plan.compares:
            return
        gathered = self.plan.collectives.allgather_object(
            {"first": self._record.first, "whole": self._record.whole},
            name="content of the tf.data pipeline",
        )
        facts = [{"the first joint step (fingerprint)": entry["first"]} for entry in gathered]
        # A rank that hasn't fetched its last step yet has no digest of the whole pass.
        if all(entry["whole"] for entry in gathered):
            for fact, entry in zip(facts, gathered):
                fact["a whole pass (fingerprint)"] = entry["whole"]
        raise_if_different(facts, remedies=REMEDIES)

    def _add_class_weights(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self.plan.class_weight is None:
            return dataset
        parts = batch_structure.batch_parts(dataset.element_spec)
        if len(parts) < 2 or batch_structure.is_absent(parts[1]):
            raise DataError("class_weight needs a dataset with targets, with elements (x, y).")
        return dataset.map(keras_tensorflow.class_weight_map(self.plan.class_weight))

    def _make(
        self,
        dataset: tf.data.Dataset,
        batches: int | None,
        steps: int | None,
        record: _StreamRecord,
    ) -> tf.data.Dataset:
        """Make a dataset with this rank's share of each step.

        ``record`` receives the digests of the batches. If this rank's data ends early, the last
        steps have rows = 0.
        """
        plan = self.plan
        padding = 0
        if plan.presharded and steps is not None and batches is not None:
            padding = steps - batches
        with tf.device("CPU:0"):
            if plan.shards == 1 and not padding:
                dataset = dataset.map(_undecorated(self._single_batch))
            else:
                specs = batch_structure.present_leaves(self._spec)
                dataset = dataset.map(_undecorated(self._prepare))
                dataset = _join_steps(
                    dataset,
                    rank=plan.shard,
                    size=plan.shards,
                    blanks=_components([blank_value(spec) for spec in specs]),
                    # One more end mark, because the first one emits the last step with batches.
                    ends=padding + (batches != 0),
                    padded=batches == 0,
                )
                dataset = dataset.map(_undecorated(functools.partial(self._share, record)))
            if steps is not None:
                dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
            return without_autotuning(dataset).prefetch(tf.data.AUTOTUNE)

    def _single_batch(self, *element: Any) -> Share:
        """Convert a batch to a ``Share``, for a rank that uses every batch that it reads."""
        components, rows, _, _ = self._prepare(*element)
        unknown = tf.constant(JOINT_ROWS_UNKNOWN, tf.int32)
        return Share(self._pack(components), rows, unknown if self.plan.presharded else rows)

    def _pack(self, components: tuple[tf.Tensor, ...]) -> Any:
        specs = batch_structure.present_leaves(self._spec)
        leaves = tf.nest.pack_sequence_as(specs, components, expand_composites=True)
        return batch_structure.replace_leaves(self._spec, leaves)

    def _prepare(self, *element: Any) -> tuple[Any, ...]:
        """Return a batch's components, number of rows and digest, and a flag.

        The flag is True here. It is False for an end mark, which ``_join_steps`` expects after the
        batches.
        """
        # tf.data passes the entries of a tuple as arguments, even if there is a single one.
        batch = element if type(self._spec) is tuple else element[0]
        leaves = batch_structure.present_leaves(batch)
        hashed = tf.zeros([8], tf.uint8)
        if self.plan.compares:
            hashed = digest(batch_structure.identifying_leaves(batch))
        return _components(leaves), count_rows(leaves[0]), hashed, True

    def _share(
        self,
        record: _StreamRecord,
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
        if self.plan.compares:

            def note() -> tf.Tensor:
                noted = tf.numpy_function(record.note, [stream, step, last], [])
                with tf.control_dependencies([noted]):
                    return tf.identity(rows)

            rows = tf.cond(tf.equal(step, 0) | last, note, lambda: rows)
        return Share(batch, rows, joint_rows)


def _join_steps(
    dataset: tf.data.Dataset,
    *,
    rank: int,
    size: int,
    blanks: tuple[tf.Tensor, ...],
    ends: int,
    padded: bool,
) -> tf.data.Dataset:
    """Convert a stream of batches to a stream of steps. Each step contains this rank's batch.

    Input elements are tuples (components, rows, digest, True), one for each batch. Output elements
    are tuples (True, components, rows, joint_rows, step, last, digest), one for each step of all
    ranks. A step is emitted when the next batch or the end has been read, because ``last`` is
    unknown before. Only one batch is kept in memory.

    Args:
        dataset: A dataset with one element per batch. An end mark is an element with False instead
            of True.
        rank: This rank.
        size: The number of ranks.
        blanks: The components to compute with if there are no batches.
        ends: The number of end marks to append. The first end mark emits the last step with
            batches. Each further end mark emits a step with rows = 0.
        padded: Whether end marks emit steps even if there are no batches at all. The first end mark
            then emits a step with rows = 0.
    """
    no_digest = tf.zeros([8], tf.uint8)
    zero = tf.constant(0, tf.int32)
    end = tf.data.Dataset.from_tensors((blanks, zero, no_digest, False))
    dataset = dataset.concatenate(end.repeat(ends))
    # The state contains the number of batches in the current joint step, this rank's batch, its
    # rows, the joint rows, the number of steps emitted, and the digest of the stream.
    state = (zero, blanks, zero, zero, tf.constant(0, tf.int64), no_digest)
    advance = _advance(rank, size, padded, dataset.element_spec)
    dataset = dataset.scan(state, _undecorated(lambda *arguments: advance(*arguments)))
    return dataset.filter(_undecorated(lambda ready, *_: ready))


@functools.lru_cache(maxsize=32)
def _advance(rank: int, size: int, padded: bool, element_spec: Any) -> Callable[..., Any]:
    """Return the function for ``Dataset.scan``, cached because tracing takes 0.1 s."""
    counter, steps = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)
    components, _, stream, _ = element_spec
    state_spec = (counter, components, counter, counter, steps, stream)

    def advance(state: tuple[Any, ...], element: tuple[Any, ...]) -> tuple[Any, Any]:
        count, held, rows, joint_rows, step, stream = state
        components, batch_rows, hashed, is_batch = element
        full = tf.equal(count, size)
        ready = tf.where(is_batch, full, (count > 0) | (step > 0) | padded)
        emitted = (ready, held, rows, joint_rows, step, ~is_batch, stream)
        place = tf.where(full, 0, count)
        # Until this rank's batch arrives, hold an earlier batch to compute with.
        held = tf.cond(is_batch & (place <= rank), lambda: components, lambda: held)
        rows = tf.where(tf.equal(place, rank), batch_rows, tf.where(tf.equal(place, 0), 0, rows))
        joint_rows = tf.where(full, 0, joint_rows) + batch_rows
        new_state = (
            tf.where(is_batch, place + 1, 0),
            held,
            tf.where(is_batch, rows, 0),
            tf.where(is_batch, joint_rows, 0),
            step + tf.cast(ready, tf.int64),
            chain_digests(stream, hashed),
        )
        return new_state, emitted

    return tf.function(advance, input_signature=(state_spec, element_spec), autograph=False)


def _skip_done(dataset: tf.data.Dataset, position: Position) -> tf.data.Dataset:
    """Return a dataset with the batches that are left at ``position``.

    Batches that lost ranks had taken come first, because they come earlier in the order.
    """
    missed = tf.constant(position.missed, tf.int64)

    def is_left(place: tf.Tensor, *_: Any) -> tf.Tensor:
        return (place >= position.start) | tf.reduce_any(tf.equal(place, missed))

    left = dataset.enumerate().filter(_undecorated(is_left))
    return left.map(_undecorated(lambda _, element: element))


def _components(leaves: list[Any]) -> tuple[tf.Tensor, ...]:
    """Return the leaves as dense tensors. ``Dataset.scan`` doesn't support ragged tensors."""
    return tuple(tf.nest.flatten(leaves, expand_composites=True))


def _check_batched(spec: Any) -> None:
    """Check that all components of a batch have the same number of rows."""
    sizes: dict[int, str] = {}
    for name, leaf in zip(batch_structure.leaf_names(spec), keras.tree.flatten(spec)):
        if batch_structure.is_absent(leaf):
            continue
        blank_value(leaf)
        if leaf.shape.rank == 0:
            raise DataError(
                f"The dataset isn't batched: {name} is a single value per element. Call "
                "Dataset.batch(n), where n is the number of rows per rank and step."
            )
        if leaf.shape.rank is not None and leaf.shape[0] is not None:
            sizes.setdefault(leaf.shape[0], name)
    if len(sizes) > 1:
        text = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise DataError(
            f"The components of the dataset must have the same number of rows, got: {text}. If it "
            "isn't batched, call Dataset.batch(n), where n is the number of rows per rank and step."
        )
