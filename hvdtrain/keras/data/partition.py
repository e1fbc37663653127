"""The partition of an epoch's samples among ranks and steps, and positions within it.

For ``rows`` samples, ``batch_size`` samples per rank and ``size`` ranks:

- All ranks compute the same order of the samples from the seed and the epoch.
- Each joint step takes the next ``batch_size * size`` samples of that order, and rank ``r`` gets
  the ``r``-th part of them. N ranks therefore train like one process with N times the batch size.
- The last joint step may be smaller. Its samples are divided as evenly as possible.

A position therefore doesn't depend on the number of ranks. The batches of other inputs are
partitioned by the same rule. A rank takes one batch in each step.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.errors import DataError

__all__ = [
    "JointSteps",
    "Position",
    "Shuffle",
    "epoch_order",
    "joint_steps",
    "rank_share",
    "remaining_units",
]

Shuffle = bool | Literal["batch"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a pass over the data.

    A unit is a sample if the input consists of arrays, and a batch otherwise. From a position, the
    pass first reads the ``missed`` units. Then it continues in its order from the place ``start``.

    Attributes:
        epoch: The epoch that determines the order of the pass. For a ``tf.data`` pipeline, this is
            the number of passes that were started before.
        start: The first place in the order that was not taken yet. All units before it are done,
            except for the ``missed`` units.
        missed: The places before ``start``, in ascending order, whose units were taken by ranks
            that were lost.
        joint_batch: The number of units in a full joint step when the pass was started, which
            determines the order with ``shuffle="batch"``; None before the pass starts.

    Raises:
        DataError: If the values are not valid.
    """

    epoch: int
    start: int = 0
    missed: tuple[int, ...] = ()
    joint_batch: int | None = None

    def __post_init__(self) -> None:
        joint_batch = 1 if self.joint_batch is None else self.joint_batch
        if not (
            all(map(_is_count, (self.epoch, self.start, *self.missed, joint_batch)))
            and joint_batch > 0
            and all(one < two for one, two in itertools.pairwise((*self.missed, self.start)))
        ):
            raise DataError(
                f"Invalid position in the data, got {self!r:.200}; expected non-negative integers, "
                "and missed places in ascending order below start."
            )

    def after(self, units: int) -> Position:
        """Return the position after the next ``units`` units."""
        done = min(units, len(self.missed))
        return dataclasses.replace(self, start=self.start + units - done, missed=self.missed[done:])

    def places(self, units: Iterable[int]) -> list[int]:
        """Convert units, counted from this position, into places in the order of the pass."""
        count = len(self.missed)
        return [self.missed[unit] if unit < count else self.start + unit - count for unit in units]

    def missing(self, places: Iterable[int]) -> Position:
        """Return this position with these places added to ``missed``.

        Raises:
            DataError: If a place is not below ``start``.
        """
        return dataclasses.replace(self, missed=tuple(sorted({*self.missed, *places})))

    def left_of(self, units: int) -> int:
        """Return the number of units left at this position in a pass of ``units`` units."""
        return bisect.bisect_left(self.missed, units) + max(0, units - self.start)

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Return the position that ``dataclasses.asdict`` has converted into ``value``.

        Raises:
            DataError: If the value is not a valid position.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if (
            not isinstance(value, dict)
            or set(value) != names
            or not isinstance(value["missed"], (list, tuple))
        ):
            raise DataError(
                f"Invalid position in the data, got {value!r:.200}; expected an object with the "
                "entries epoch, start, missed (a list) and joint_batch."
            )
        return cls(**{**value, "missed": tuple(value["missed"])})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def joint_steps(rows: int, batch_size: int, size: int) -> int:
    """Return the number of joint steps of an epoch."""
    return -(-rows // (batch_size * size))


def epoch_order(
    rows: int, *, shuffle: Shuffle, joint_batch: int, seed: int, epoch: int
) -> np.ndarray:
    """Return the order of the samples in an epoch.

    Args:
        rows: The number of samples.
        shuffle: True to shuffle all samples; ``"batch"`` to shuffle the samples within each joint
            batch; False to keep the given order.
        joint_batch: The number of samples in a full joint step.
        seed: A non-negative integer that is the same on all ranks.
        epoch: The number of the epoch, from 0.

    Returns:
        A permutation of ``range(rows)``, of dtype int64.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    random = np.random.default_rng([seed, epoch])
    if shuffle != "batch":
        return random.permutation(rows)
    order = np.arange(rows, dtype=np.int64)
    full = rows - rows % joint_batch
    order[:full] = random.permuted(order[:full].reshape(-1, joint_batch), axis=1).reshape(-1)
    order[full:] = random.permutation(order[full:])
    return order


def remaining_units(order: np.ndarray, position: Position) -> np.ndarray:
    """Return the missed units at ``position``, followed by the rest of the order."""
    missed = np.asarray(position.missed, np.int64)
    return np.concatenate([order[missed[missed < len(order)]], order[position.start :]])


@dataclass(frozen=True, kw_only=True)
class JointSteps:
    """The joint steps of the rest of a pass, and each rank's share of them.

    Attributes:
        units: The number of units left; None if unknown or infinite.
        each: The number of units that a rank takes in a full step.
        size: The number of ranks.
    """

    units: int | None
    each: int
    size: int

    @property
    def steps(self) -> int | None:
        """The number of joint steps, or None if it is unknown or infinite."""
        return None if self.units is None else joint_steps(self.units, self.each, self.size)

    def units_in(self, first_step: int, steps: int) -> int:
        """Return the number of units in ``steps`` joint steps, starting with ``first_step``.

        If the length is unknown, all steps are assumed to be full.
        """
        return self._before(first_step + steps) - self._before(first_step)

    def share(self, step: int, rank: int) -> range:
        """Return the units of ``rank`` in ``step``, numbered from the start of these steps."""
        first, end = self._before(step), self._before(step + 1)
        if end - first == self.each * self.size:
            return range(first + rank * self.each, first + (rank + 1) * self.each)
        start, stop = split_evenly(end - first, self.size)[rank]
        return range(first + start, first + stop)

    def _before(self, step: int) -> int:
        full = step * self.each * self.size
        return full if self.units is None else min(full, self.units)


def rank_share(
    order: np.ndarray, *, batch_size: int, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return one rank's share of an epoch's order.

    Returns:
        The rank's samples in the full joint steps, of shape (steps, batch_size), and its samples in
        the last, partial step. If the rank's share of the partial step is empty, the second array
        contains one sample to compute with, whose result must be ignored.
    """
    joint_batch = batch_size * size
    steps, rest = divmod(len(order), joint_batch)
    full = order[: steps * joint_batch].reshape(steps, size, batch_size)[:, rank]
    tail = order[steps * joint_batch :]
    start, stop = split_evenly(rest, size)[rank]
    return np.ascontiguousarray(full), tail[start:stop] if stop > start else tail[:1]
