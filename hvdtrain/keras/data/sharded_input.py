"""The contract that every kind of input fulfils: ``Source`` and ``ShardedInput``.

A source looks at what the user passed, says what the ranks have to agree on, and then makes this
rank's share of it; ``shard_input`` drives it. Training loops see the share and the passes over it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.partition import JointSteps, joint_steps
from hvdtrain.keras.data.shard_plan import InputReport, ShardPlan

__all__ = ["JOINT_ROWS_UNKNOWN", "Pass", "ShardedInput", "Share", "Source"]

JOINT_ROWS_UNKNOWN = -1
"""``joint_rows`` of an element where only a reduction over the ranks can tell it."""


class Share(NamedTuple):
    """A rank's share of a joint step: an element of ``ShardedInput.dataset``.

    Attributes:
        batch: Structured as the user passed it: what Keras gives a step in one process.
        rows: int32; how many rows of the batch count: all, or 0 in a step in which this rank has
            nothing and ``batch`` is any batch of the right structure.
        joint_rows: int32; the sum of ``rows`` over the ranks, -1 or None where it is not known.
    """

    batch: Any
    rows: tf.Tensor
    joint_rows: tf.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The rest of a pass over the data, for this rank.

    Attributes:
        steps: Joint steps that are left; None where unknown or endless.
        position: Where it begins.
        joint: How the units that are left fall into steps and to ranks.
        presharded: They are units of this rank's own data.
        make: Makes ``dataset``.
    """

    steps: int | None
    position: Position
    joint: JointSteps
    presharded: bool
    make: Callable[[], tf.data.Dataset]

    @functools.cached_property
    def dataset(self) -> tf.data.Dataset:
        """The elements of the pass, to be iterated once; asking for them begins it.

        Raises:
            DataError: A pipeline can't give the pass's order again.
        """
        return self.make()

    def after(self, steps: int) -> Position:
        """The position after the first ``steps`` joint steps, for any number of ranks."""
        return self.position.after(self.joint.units_in(0, steps))

    def share(self, step: int, rank: int) -> range:
        """Return the units ``rank`` takes in joint ``step``, counted in what was left at the start.

        Raises:
            DataError: Every rank has its own data, or there is no such rank.
        """
        if self.presharded or not 0 <= rank < self.joint.size:
            raise DataError(
                f"The share of rank {rank} can't be done by other ranks: "
                + (
                    "with presharded=True it is in that rank's own data."
                    if self.presharded
                    else f"expected a rank below {self.joint.size}, that began this pass."
                )
            )
        return self.joint.share(step, rank)


class Source(Protocol):
    """One kind of input, before it is shared out.

    Attributes:
        plan: How it is shared out.
        unit: The thing that is shared out: "samples" or "batches".
        units: How many of them a pass over this rank's data has; None where unknown or endless.
        each: How many of them a rank takes in a whole step.
    """

    plan: ShardPlan

    @property
    def unit(self) -> str: ...

    @property
    def units(self) -> int | None: ...

    @property
    def each(self) -> int: ...

    def report(self) -> InputReport:
        """Look at the input, without talking to other ranks.

        Raises:
            DataError: The input can't be shared out, whatever the others have.
        """
        ...

    def shard(self, steps: int | None) -> ShardedInput:
        """Make this rank's share.

        Args:
            steps: Joint steps of one pass as the ranks agreed on it; None where unknown or
                endless.
        """
        ...


class ShardedInput:
    """One rank's share of an input, in the form in which it enters Keras' loops.

    Attributes:
        dataset: A ``tf.data.Dataset`` of one pass over the data, whose elements are ``Share``.
        steps: Joint steps of one pass, the dataset's cardinality; None where unknown or endless.
            A PyDataset may have others in each epoch, and another ``dataset`` then.
        joint_rows_known: Whether ``joint_rows`` is ever other than -1.
        unit: The thing that positions in the data count: "samples" or "batches".
        each: How many of them a rank takes in a whole step.
        units: How many there are in a pass; None where unknown or endless.
        presharded: Whether each rank has data of its own.
        notice: A line that the user should see once, or None.

    Pass ``dataset`` to Keras with the user's ``steps_per_epoch`` unchanged: where that is less
    than a pass, Keras' iterator goes on in the next epoch, alike on every rank.
    Or give it the ``dataset`` of a pass that ``begin`` made, which may start anywhere. Use one way
    or the other: a ``tf.data`` pipeline that shuffles counts the passes.
    The three hooks are collective: every rank calls them at the same points.
    """

    def __init__(
        self,
        source: Source,
        make_dataset: Callable[[], tf.data.Dataset],
        *,
        steps: int | None,
        joint_rows_known: bool,
        notice: str | None = None,
    ) -> None:
        self._source = source
        self.unit = source.unit
        self.each = source.each
        self.units = source.units
        self.presharded = source.plan.presharded
        self._make_dataset = make_dataset
        self.steps = steps
        self.joint_rows_known = joint_rows_known
        self.notice = notice

    @functools.cached_property
    def dataset(self) -> tf.data.Dataset:
        """One pass over the data; made when it is first asked for, in some milliseconds."""
        return self._make_dataset()

    @property
    def follows_global_seed(self) -> bool:
        """Whether the order of a pass depends on TensorFlow's seed when the input was made."""
        return False

    def begin(
        self, position: Position, *, ranks: int | None = None, repeatable: bool = False
    ) -> Pass:
        """Begin a pass over the data at ``position``; call after ``on_epoch_begin``.

        Communicates with nobody. From the start of an epoch it gives what ``dataset`` gives in
        that epoch. Passes begun earlier are not to be read any more.

        Args:
            position: Where; the same on all ranks.
            ranks: How many ranks there were when the position was reached, if that is known.
            repeatable: Be ready to begin this pass again in this process, at a later position, if
                ``repeatable`` says that it can be. Costs something for ``tf.data`` pipelines that
                shuffle, and nothing for others.

        Raises:
            DataError: This data has no such position, or ranks with data of their own are not as
                many as they were.
        """
        source, plan = self._source, self._source.plan
        units = source.units
        if plan.presharded:
            # As many as the longest rank has; this rank's may end earlier.
            units = None if self.steps is None else self.steps * source.each
            self._check_same_ranks(plan.size if ranks is None else ranks, plan.size)
        if plan.presharded and position.missed:
            raise DataError(
                "With presharded=True what a lost rank had taken is in its own data; no other "
                f"rank can do it. Received a position that lists it: {asdict(position)}."
            )
        if units is not None and position.start > units:
            raise DataError(
                f"Training is to go on after {position.start} {self.unit} of epoch "
                f"{position.epoch}, and the input has {units}. Pass the same data as before."
            )
        if position.joint_batch is None:
            position = replace(position, joint_batch=source.each * plan.shards)
        left = None if units is None else position.left_of(units)
        joint = JointSteps(units=left, each=source.each, size=plan.shards)
        return Pass(
            steps=joint.steps,
            position=position,
            joint=joint,
            presharded=plan.presharded,
            make=functools.partial(self._dataset_from, position, joint.steps, repeatable),
        )

    def _dataset_from(
        self, position: Position, steps: int | None, repeatable: bool
    ) -> tf.data.Dataset:
        """The elements of ``begin``: ``steps`` joint steps, or as many as there turn out to be."""
        raise NotImplementedError

    def reshard(self, *, rank: int, size: int) -> ShardedInput:
        """This input, shared out among ``size`` ranks, of which this one is now number ``rank``.

        Communicates with nobody. Where they are as many as before it is this object.

        Raises:
            DataError: Every rank has its own data, and there are not as many as before.
        """
        source = copy.copy(self._source)
        if (source.plan.rank, source.plan.size) == (rank, size):
            return self
        if source.plan.presharded:
            self._check_same_ranks(source.plan.size, size)
        source.plan = replace(source.plan, rank=rank, size=size)
        if source.plan.presharded or source.units is None:
            return source.shard(self.steps)
        return source.shard(joint_steps(source.units, source.each, size))

    @staticmethod
    def _check_same_ranks(before: int, now: int) -> None:
        if before != now:
            raise DataError(
                f"This training had {before} ranks and has {now} now. With presharded=True every "
                f"rank has its own data, which can't be shared out anew: start {before} ranks, or "
                "pass the whole data on every rank and leave presharded out."
            )

    def agree_on_steps(self, block: int) -> int:
        """Return how many of the next ``block`` steps a pass of unknown length has; collective.

        Call before each block in a pass whose ``steps`` are None, where that is not for Keras to
        find out, by the end of the dataset.
        """
        return block

    @property
    def repeatable(self) -> bool:
        """Whether a pass can be begun again in this process; else ``Pass.dataset`` raises."""
        return True

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Call before the first ``on_epoch_begin`` of a process that resumes a training.

        Puts an input that changes from epoch to epoch where the epochs before would have put it.

        Args:
            epochs: How many have ended before.
            passes: How many passes were begun before that which is the next or goes on: as many as
                epochs, or fewer where ``steps_per_epoch`` lets passes last longer.

        Raises:
            DataError: The input was read too far in this process already.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """Call before Keras starts to iterate; a pass that starts then has this epoch's order."""

    def verify(self) -> None:
        """Call after the first step of an epoch: do all ranks read the same stream?

        Some inputs show what they hold only when they run. ``on_epoch_end`` does the same; after
        one step the user has waited less.

        Raises:
            DataError: They don't; raised on every rank.
        """

    def on_epoch_end(self) -> None:
        """Call after the last step of an epoch.

        Raises:
            DataError: Ranks have read different streams.
        """
        self.verify()
