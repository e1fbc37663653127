"""Which sample goes to which rank at which step: pure arithmetic on indices.

The rule, for ``rows`` samples, ``batch_size`` samples per rank and ``size`` ranks:

- an epoch visits the samples in one order that every rank computes alike from (seed, epoch);
- joint step ``k`` takes the next ``batch_size * size`` samples of that order, and rank ``r`` the
  ``r``-th part of them, so that N ranks see what one process with N times the batch would see;
- the last joint step may hold fewer samples; they are shared out as evenly as possible.

A position in the data is therefore (seed, epoch, step), or (seed, sample index): it names no rank
and survives a change of their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["RankShare", "Shuffle", "epoch_order", "joint_steps", "rank_share", "split_evenly"]

Shuffle = bool | Literal["batch"]


def joint_steps(rows: int, batch_size: int, size: int) -> int:
    """Steps of one epoch, the same on every rank."""
    return -(-rows // (batch_size * size))


def split_evenly(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of this rank's part of ``rows``; the first ranks get one more."""
    each, extra = divmod(rows, size)
    start = rank * each + min(rank, extra)
    return start, start + each + (rank < extra)


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


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank takes from an epoch's order.

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
    start, stop = split_evenly(rest, rank, size)
    last = tail[start:stop] if stop > start else tail[:1]
    return RankShare(
        whole=np.ascontiguousarray(whole),
        last=last,
        last_rows=stop - start,
        last_joint_rows=rest,
    )
