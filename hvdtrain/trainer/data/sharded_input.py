"""The base class of all kinds of input, and the classes that it uses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras

from hvdtrain.collectives.engine import Engine
from hvdtrain.data.input_agreement import InputReport
from hvdtrain.data.partition import JointSteps, Position, Shuffle, joint_steps
from hvdtrain.errors import DataError
from hvdtrain.trainer.data.host_batches import HostBatches

__all__ = ["Pass", "ShardPlan", "ShardedInput"]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How an input is divided among ranks."""

    rank: int  # the rank of this process
    size: int  # the number of ranks
    seed: int  # a non-negative integer that determines the order of the data on all ranks
    collectives: Engine  # the connection between the ranks
    # ``steps_per_epoch`` of ``fit``, or ``steps`` of ``evaluate`` and ``predict``. None to read the
    # whole data.
    steps: int | None = None
    # The number of rows that a rank takes in a step. Used only for arrays. None selects Keras'
    # default.
    batch_size: int | None = None
    # whether to shuffle arrays or the batches of a ``PyDataset`` in each epoch
    shuffle: Shuffle = False
    class_weight: Any = None  # the argument of ``fit``
    # Whether each rank passes different data and uses all of it. Ranks with less data compute with
    # rows = 0 in the last steps of an epoch.
    presharded: bool = False
    trains: bool = False  # whether an ``EpochIterator`` reads the data

    @property
    def shards(self) -> int:
        """The number of parts into which this rank's data is divided."""
        return 1 if self.presharded else self.size

    @property
    def shard(self) -> int:
        """The index of the part that this rank uses, from 0."""
        return 0 if self.presharded else self.rank

    @property
    def compares(self) -> bool:
        """Whether ranks check that they read the same data."""
        return self.shards > 1


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over the data, from some position to the end of the data."""

    # The number of steps that are left, which is the same on all ranks. None if unknown or
    # infinite.
    steps: int | None
    position: Position  # the position where reading starts
    # The division of the remaining units among steps and ranks. A unit is a sample or a batch.
    joint: JointSteps
    # Whether each rank has different data. Then no other rank can read this rank's data.
    presharded: bool
    # A function that creates ``dataset``. The result may also be ``HostBatches`` on TensorFlow, or
    # a ``tf.data.Dataset`` on other backends.
    make: Callable[[], Any]

    @functools.cached_property
    def dataset(self) -> Any:
        """This rank's share of each remaining step. It can be iterated once.

        It is a ``tf.data.Dataset`` on TensorFlow, and ``HostBatches`` on other backends.

        The first access to this attribute starts to read the data.

        Raises:
            DataError: If the data must be read again in the same order, but a ``tf.data`` pipeline
                can't do this.
        """
        return _for_backend(self.make())

    def after(self, steps: int) -> Position:
        """Return the position after ``steps`` more steps of all ranks."""
        return self.position.after(self.joint.units_in(steps))

    def share(self, step: int, rank: int) -> range:
        """Return the range of units that ``rank`` takes in a step, counted from ``position``.

        Raises:
            DataError: If the data is presharded, so that only that rank has its data.
        """
        if self.presharded:
            raise DataError(
                f"The data of rank {rank} is lost: with presharded=True no other rank has it."
            )
        return self.joint.share(step, rank)


class ShardedInput:
    """One rank's share of an input. Each kind of input has a subclass.

    Read either the attribute ``dataset`` of this object, or the ``dataset`` of a ``Pass`` that
    ``begin`` returns, but not both: if a ``tf.data`` pipeline shuffles, its order depends on how
    often reading was started before. All ranks must call ``agree_on_steps``, ``on_epoch_begin``,
    ``verify`` and ``on_epoch_end`` together.

    Attributes:
        plan: How the input is divided.
        unit: The unit of positions: "samples" or "batches".
        each: The number of units that a rank takes in a full step.
        units: The number of units in this rank's data. None if unknown or infinite.
        steps: The number of steps that all ranks need to read the data once. This is the number of
            elements of ``dataset``. None if unknown or infinite. With a ``PyDataset``, ``steps``
            and ``dataset`` may change in each epoch.
        joint_rows_known: Whether each ``Share`` contains ``joint_rows``.
        notice: A recommendation for the user, which is logged once, or None.
        presharded: Whether each rank has different data.
        repeatable: Whether a pass over the data can be started again in the same order. If not, an
            attempt to do so raises an error when the dataset is read.
        follows_global_seed: Whether the order of the data depends on TensorFlow's global seed.
    """

    unit = "batches"
    each = 1
    units: int | None = None
    steps: int | None = None
    joint_rows_known = False
    notice: str | None = None
    repeatable = True
    follows_global_seed = False

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self.presharded = plan.presharded

    def report(self) -> InputReport:
        """Inspect the input without communication, and return a report.

        Raises:
            DataError: If the input can't be used.
        """
        raise NotImplementedError

    def set_steps(self, steps: int | None) -> None:
        """Set how many steps all ranks take together in one pass over the data.

        Passes that were started before can't be read any more. The ranks must have agreed on
        ``steps``.
        """
        self.steps = steps
        self.__dict__.pop("dataset", None)

    @functools.cached_property
    def dataset(self) -> Any:
        """This rank's share of each step of a pass. Its elements are of type ``Share``.

        It is a ``tf.data.Dataset`` on TensorFlow, and ``HostBatches`` on other backends.
        """
        return _for_backend(self._whole_pass())

    def _whole_pass(self) -> Any:
        raise NotImplementedError

    def _rest_of_pass(self, position: Position, steps: int | None, repeatable: bool) -> Any:
        raise NotImplementedError

    def begin(
        self, position: Position, *, ranks: int | None = None, repeatable: bool = False
    ) -> Pass:
        """Start to read the data at ``position``, without communication.

        Call this after ``on_epoch_begin``. Afterwards, a ``Pass`` that an earlier call returned
        must not be read any more.

        Args:
            position: The position, which must be the same on all ranks.
            ranks: The number of ranks when the position was reached. Needed if the number may have
                changed since then.
            repeatable: Whether it must be possible to read the data again in the same order. This
                makes pipelines that shuffle slower.

        Raises:
            DataError: If the data ends before ``position``, or if the data is presharded and the
                number of ranks has changed.
        """
        plan, units = self.plan, self.units
        if plan.presharded:
            # The units of the rank with the most data.
            units = None if self.steps is None else self.steps * self.each
            self._check_ranks(plan.size if ranks is None else ranks, plan.size)
            if position.missed:
                raise DataError(
                    "With presharded=True the data of a lost rank can't be read by another rank, "
                    f"got {position}; start the training again."
                )
        if units is not None and position.start > units:
            raise DataError(
                f"The input has {units} {self.unit}, but epoch {position.epoch} must resume after "
                f"{position.start}; pass the same data as before."
            )
        if position.joint_batch is None:
            position = replace(position, joint_batch=self.each * plan.shards)
        left = None if units is None else position.left_of(units)
        joint = JointSteps(units=left, each=self.each, size=plan.shards)
        return Pass(
            steps=joint.steps,
            position=position,
            joint=joint,
            presharded=plan.presharded,
            make=lambda: self._rest_of_pass(position, joint.steps, repeatable),
        )

    def reshard(self, *, rank: int, size: int) -> ShardedInput:
        """Return this input divided among ``size`` ranks, without communication.

        Raises:
            DataError: If the data is presharded and the number of ranks has changed.
        """
        plan = self.plan
        if (plan.rank, plan.size) == (rank, size):
            return self
        if plan.presharded:
            self._check_ranks(plan.size, size)
        resharded = copy.copy(self)
        resharded.plan = replace(plan, rank=rank, size=size)
        if not plan.presharded and self.units is not None:
            resharded.set_steps(joint_steps(self.units, self.each, size))
        else:
            resharded.set_steps(self.steps)
        return resharded

    @staticmethod
    def _check_ranks(before: int, now: int) -> None:
        if before != now:
            raise DataError(
                f"The number of ranks was {before}, got {now}. With presharded=True each rank has "
                f"different data, which can't be redistributed. Start {before} ranks, or pass all "
                "data on every rank without presharded."
            )

    def agree_on_steps(self, block: int) -> int:
        """Return how many of the next ``block`` steps exist, if the length is unknown."""
        return block

    def catch_up(self, *, epochs: int, passes: int) -> None:
        """Advance the data as if the earlier epochs had been trained in this process.

        Args:
            epochs: The number of completed epochs.
            passes: The number of completed passes over the data. It is smaller than ``epochs`` if
                reading the whole data takes several epochs.

        Raises:
            DataError: If the data has already been read past this point.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """Set the epoch. It determines the order in which the data is read next."""

    def verify(self) -> None:
        """Check that all ranks read the same data. Called after the first step of an epoch.

        Raises:
            DataError: If the data differs. Every rank raises it.
        """

    def on_epoch_end(self) -> None:
        """Check that all ranks have read the same data. Called at the end of an epoch.

        Raises:
            DataError: If the data differs. Every rank raises it.
        """
        self.verify()


def _for_backend(steps: Any) -> Any:
    """Convert ``HostBatches`` or a ``tf.data.Dataset`` to what Keras' backend reads."""
    in_tensorflow = keras.backend.backend() == "tensorflow"
    if isinstance(steps, HostBatches) is not in_tensorflow:
        return steps
    from hvdtrain.trainer.data.tensorflow import datasets

    return datasets.to_dataset(steps) if in_tensorflow else datasets.from_dataset(steps)
