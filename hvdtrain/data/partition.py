"""The partition of an epoch's samples among ranks and steps, and positions within it.

For ``rows`` samples, ``batch_size`` samples per rank and ``size`` ranks:

- All ranks compute the same order of the samples from the seed and the epoch.
- In each step, all ranks together take the next ``batch_size * size`` samples of that order, and
  rank ``r`` gets the ``r``-th part of these samples. N ranks therefore train like one process with
  N times the batch size.
- The last step may have fewer samples. These are divided as evenly as possible.

A position in the order therefore means the same for any number of ranks. Inputs other than arrays
consist of batches. The batches are divided by the same rule, and a rank takes one batch in each
step.
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
    """A position in a pass over the data. Training can resume at a position.

    A unit is a sample if the input consists of arrays, and a batch otherwise. A pass reads the
    units in some order, and the place of a unit is its index in this order. Suppose that a rank was
    lost after 100 units, and the lost rank had taken the units at places 90 to 99. Then ``start``
    is 100, and ``missed`` contains the numbers 90 to 99. From a position, a pass first reads the
    ``missed`` units, and then continues at place ``start``.

    Raises:
        DataError: If the values are not valid.
    """

    # The epoch that determines the order of the pass. For a ``tf.data`` pipeline, this is the
    # number of passes that were started before.
    epoch: int
    # The first place whose unit no rank has taken yet. Training has used all units before this
    # place, except for the ``missed`` units.
    start: int = 0
    # the places before ``start``, in ascending order, whose units were taken by ranks that were
    # lost
    missed: tuple[int, ...] = ()
    # The number of units that all ranks together took in a full step at the time when the pass was
    # started. With ``shuffle="batch"``, this number determines the order. None before the pass
    # starts.
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
        """Return the position after reading ``units`` more units."""
        done = min(units, len(self.missed))
        return dataclasses.replace(self, start=self.start + units - done, missed=self.missed[done:])

    def places(self, units: Iterable[int]) -> list[int]:
        """Convert numbers of units, counted from this position, to places in the pass's order."""
        count = len(self.missed)
        return [self.missed[unit] if unit < count else self.start + unit - count for unit in units]

    def missing(self, places: Iterable[int]) -> Position:
        """Return a copy of this position that also counts these places as ``missed``.

        Raises:
            DataError: If a place is not below ``start``.
        """
        return dataclasses.replace(self, missed=tuple(sorted({*self.missed, *places})))

    def left_of(self, units: int) -> int:
        """Return how many units are left at this position if the whole pass has ``units`` units."""
        return bisect.bisect_left(self.missed, units) + max(0, units - self.start)

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Create a position from a dictionary that ``dataclasses.asdict`` returned.

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
    """Return how many steps all ranks take together in an epoch."""
    return -(-rows // (batch_size * size))


def epoch_order(
    rows: int, *, shuffle: Shuffle, joint_batch: int, seed: int, epoch: int
) -> np.ndarray:
    """Return the order of the samples in an epoch.

    Args:
        rows: The number of samples.
        shuffle: True to shuffle all samples. ``"batch"`` to divide the samples into groups of
            ``joint_batch``, and shuffle within each group. False to keep the given order.
        joint_batch: The number of samples that all ranks together take in a full step.
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
    """Return the units that are left at ``position``. The missed units come first."""
    missed = np.asarray(position.missed, np.int64)
    return np.concatenate([order[missed[missed < len(order)]], order[position.start :]])


@dataclass(frozen=True, kw_only=True)
class JointSteps:
    """The remaining steps of a pass over the data, and each rank's share of each step.

    A unit is a sample if the input consists of arrays, and a batch otherwise.
    """

    units: int | None  # The number of units that are left. None if unknown or infinite.
    each: int  # the number of units that one rank takes in a full step
    size: int  # the number of ranks

    @property
    def steps(self) -> int | None:
        """The number of remaining steps, or None if it is unknown or infinite."""
        return None if self.units is None else joint_steps(self.units, self.each, self.size)

    def share(self, step: int, rank: int) -> range:
        """Return the range of remaining units that ``rank`` takes in ``step``."""
        first, end = self.units_in(step), self.units_in(step + 1)
        if end - first == self.each * self.size:
            return range(first + rank * self.each, first + (rank + 1) * self.each)
        start, stop = split_evenly(end - first, self.size)[rank]
        return range(first + start, first + stop)

    def units_in(self, steps: int) -> int:
        """Return the units in ``steps`` steps, which are full if the length is unknown."""
        full = steps * self.each * self.size
        return full if self.units is None else min(full, self.units)


def rank_share(
    order: np.ndarray, *, batch_size: int, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of one rank, in the order of an epoch.

    Returns:
        Two arrays. The first contains the rank's samples in the full steps, and has the shape
        (steps, batch_size). The second contains its samples in the last step, if that step is not
        full. If the rank has no samples in the last step, the second array contains one sample to
        compute with, whose result must be ignored.
    """
    joint_batch = batch_size * size
    steps, rest = divmod(len(order), joint_batch)
    full = order[: steps * joint_batch].reshape(steps, size, batch_size)[:, rank]
    tail = order[steps * joint_batch :]
    start, stop = split_evenly(rest, size)[rank]
    return np.ascontiguousarray(full), tail[start:stop] if stop > start else tail[:1]
