"""The largest values of gradients cross, with their places.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent", arXiv 1704.05021;
that it converges with error feedback: Stich et al. 2018, "Sparsified SGD with Memory", arXiv
1809.07599.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.fusion import split_evenly
from hvdtrain.collectives.interface import Collectives
from hvdtrain.gradients.compressors.interface import GradientCompressor, SentMeans
from hvdtrain.gradients.indexed_slices import pack_rows, unpack_rows

__all__ = ["TopK"]


class TopK(GradientCompressor):
    """Sends a share of each array, chosen by size.

    The ranks of a host add up before, each of them a part of every array, and each chooses from its
    part: a host sends as much with eight ranks as with one.

    Args:
        share: How much of the values is sent, above 0 and up to 1; of each part one at least.
        hosts: The host of each rank.
    """

    def __init__(self, share: float, hosts: Sequence[int]) -> None:
        self._share = share
        self._hosts = hosts
        self._adds_up = max(Counter(hosts).values()) > 1

    def takes(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) > 0

    def average(
        self,
        collectives: Collectives,
        arrays: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        *,
        weight: float,
        name: str,
    ) -> SentMeans:
        flat = [array.reshape(-1) for array in arrays]
        parts = self._add_up(collectives, flat, name)
        chosen = [start + self._largest(part) for start, part in parts]
        unsent = []
        for array, (start, part), places in zip(flat, parts, chosen):
            rest = np.zeros_like(array)
            rest[start : start + part.size] = part
            rest[places] = 0.0
            unsent.append(rest)
        sizes = [array.size for array in flat]
        firsts = np.cumsum([0, *sizes])
        kind = np.int32 if firsts[-1] <= np.iinfo(np.int32).max else np.int64
        values = np.concatenate([part[p - start] for (start, part), p in zip(parts, chosen)])
        places = np.concatenate([first + p for first, p in zip(firsts, chosen)]).astype(kind)
        packed = pack_rows(values, places, np.array(weight, np.float32))
        joined = collectives.allgather(packed, name=f"largest of {name}")
        values, places, weights = unpack_rows(joined, values, places)
        # In the order in which they come, which is the same on all ranks.
        total = np.bincount(places, values, firsts[-1]) / len(weights)
        means = np.split(total.astype(np.float32), firsts[1:-1])
        return SentMeans(
            [mean.reshape(array.shape) for mean, array in zip(means, arrays)],
            [rest.reshape(array.shape) for rest, array in zip(unsent, arrays)],
            list(states),
            float(np.mean(weights)),
        )

    def _add_up(
        self, collectives: Collectives, flat: Sequence[np.ndarray], name: str
    ) -> list[tuple[int, np.ndarray]]:
        """This rank's part of what its host has of each array: where it begins, and its values."""
        if not self._adds_up:
            return [(0, array) for array in flat]
        host = self._hosts[collectives.rank]
        others = [rank for rank in range(collectives.size) if self._hosts[rank] == host]
        cuts = [split_evenly(array.size, len(others)) for array in flat]
        by_rank = [[a[slice(*cut[n])] for a, cut in zip(flat, cuts)] for n in range(len(others))]
        rows = [np.concatenate(pieces) for pieces in by_rank]
        splits = [0] * collectives.size
        for rank, row in zip(others, rows):
            splits[rank] = row.size
        received, _ = collectives.alltoall(np.concatenate(rows), splits, name=f"host's {name}")
        mine = received.reshape(len(others), -1).sum(axis=0)
        bounds = [cut[others.index(collectives.rank)] for cut in cuts]
        ends = np.cumsum([stop - start for start, stop in bounds])
        return [(start, part) for (start, _), part in zip(bounds, np.split(mine, ends[:-1]))]

    def _largest(self, values: np.ndarray) -> np.ndarray:
        """The places of the largest values, NaN above all."""
        left_out = values.size - math.ceil(self._share * values.size)
        if left_out == 0:
            return np.arange(values.size)
        return np.argpartition(np.abs(values), left_out)[left_out:]
