"""The partition of samples among ranks and steps: pure arithmetic on indices.

The rule, for ``rows`` samples, ``batch_size`` samples per rank and ``size`` ranks:

- an epoch visits the samples in one order that every rank computes alike from (seed, epoch);
- joint step ``k`` takes the next ``batch_size * size`` samples of that order, and rank ``r`` the
  ``r``-th part of them, so that N ranks see what one process with N times the batch would see;
- the last joint step may hold fewer samples; they are shared out as evenly as possible.

A position in the data (see ``data_position.py``) therefore names no rank and survives a change of
their number. Batches are shared out by the same rule, as samples of which each rank takes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.keras.data.data_position import Position

__all__ = [
    "JointSteps",
    "RankShare",
    "Shuffle",
    "epoch_order",
    "joint_steps",
    "rank_share",
    "units_left",
]

Shuffle = bool | Literal["batch"]


def joint_steps(rows: int, batch_size: int, size: int) -> int:
    """Steps of one epoch, the same on every rank."""
    return -(-rows // (batch_size * size))


def epoch_order(
    rows: int, *, shuffle: Shuffle, joint_batch: int, seed: int, epoch: int
) -> np.ndarray:
    """The order of the samples in ``epoch``; int64, a permutation of ``range(rows)``.

    Args:
        rows: Number of samples.
        shuffle: True for one permutation of all samples; ``"batch"`` to keep the joint batches
            where they are and shuffle inside each of them; False for the given order.
        joint_batch: Samples of a whole joint step; matters for ``"batch"`` only.
        seed: Shared by all ranks, at least 0.
        epoch: Number of the epoch, at least 0.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    random = np.random.default_rng([seed, epoch])
    if shuffle != "batch":
        return random.permutation(rows)
    order = np.arange(rows, dtype=np.int64)
    whole = rows - rows % joint_batch
    order[:whole] = random.permuted(order[:whole].reshape(-1, joint_batch), axis=1).reshape(-1)
    order[whole:] = random.permutation(order[whole:])
    return order


def units_left(order: np.ndarray, position: Position) -> np.ndarray:
    """Return an epoch's ``order`` from ``position`` on: what was missed, then the rest."""
    if not position.missed:
        return order[position.start :]
    missed = np.asarray(position.missed, np.int64)
    return np.concatenate([order[missed[missed < len(order)]], order[position.start :]])


@dataclass(frozen=True, kw_only=True)
class JointSteps:
    """The joint steps of the units that are left of a pass, and each rank's share of them.

    Attributes:
        units: How many are left; None where that is unknown, or endless.
        each: Units that one rank takes in a whole step.
        size: Number of ranks that they are shared out to.
    """

    units: int | None
    each: int
    size: int

    @property
    def steps(self) -> int | None:
        """The number of joint steps; None where unknown or endless."""
        return None if self.units is None else joint_steps(self.units, self.each, self.size)

    def units_in(self, first_step: int, steps: int) -> int:
        """Units that ``steps`` joint steps from ``first_step`` on take together.

        Fewer in the last one; where the length is unknown, as if every step were whole.
        """
        return self._before(first_step + steps) - self._before(first_step)

    def share(self, step: int, rank: int) -> range:
        """Return ``rank``'s units in ``step``, counted in those left when the pass began."""
        first, end = self._before(step), self._before(step + 1)
        if end - first == self.each * self.size:
            return range(first + rank * self.each, first + (rank + 1) * self.each)
        start, stop = split_evenly(end - first, self.size)[rank]
        return range(first + start, first + stop)

    def _before(self, step: int) -> int:
        whole = step * self.each * self.size
        return whole if self.units is None else min(whole, self.units)


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The share of one rank in an epoch's order.

    Attributes:
        whole: Indices for the whole joint steps, int64 of shape (steps, batch_size).
        last: Indices for the last, partial joint step, int64 of shape (n,); n is at least 1
            where there is such a step, even if this rank has no part in it, and 0 otherwise.
        last_rows: How many of ``last`` count. 0: it is one sample to compute with and ignore.
        last_joint_rows: Samples of the partial joint step over all ranks; 0 if there is none.
    """

    whole: np.ndarray
    last: np.ndarray
    last_rows: int
    last_joint_rows: int


def rank_share(order: np.ndarray, *, batch_size: int, rank: int, size: int) -> RankShare:
    """Cut this rank's part out of an epoch's ``order``."""
    joint_batch = batch_size * size
    steps, rest = divmod(len(order), joint_batch)
    whole = order[: steps * joint_batch].reshape(steps, size, batch_size)[:, rank]
    tail = order[steps * joint_batch :]
    start, stop = split_evenly(rest, size)[rank]
    last = tail[start:stop] if stop > start else tail[:1]
    return RankShare(
        whole=np.ascontiguousarray(whole),
        last=last,
        last_rows=stop - start,
        last_joint_rows=rest,
    )
