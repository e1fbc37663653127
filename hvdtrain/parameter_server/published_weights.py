"""Shared memory of workers and servers on one host, for gradients and weights.

Dense gradients stay in the worker's memory, where servers read them, so a server's memory does not
grow with the number of workers. A server writes its weights to the oldest of a few slots, and
readers copy the newest slot without any lock. A reader retries if the slot's number changed during
the copy (a seqlock: Lameter 2005, "Effective synchronization on Linux/NUMA systems").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.fusion import ALIGNMENT_BYTES, BufferPool, aligned
from hvdtrain.errors import CollectiveError
from hvdtrain.parameter_server.sharding import Shard

__all__ = ["GRADIENT_SLOTS", "PublishedWeights", "SharedMemory", "published_bytes", "share_memory"]

# A worker writes to one slot while a server may still read the other.
GRADIENT_SLOTS = 2
# A reader retries only if WEIGHT_SLOTS - 1 versions are published during one copy.
WEIGHT_SLOTS = 3
MAX_READS = 1000

# The header has the number of publications and then, for each slot, the number of the publication
# that the slot holds (0 while it is written) and the version of its weights. The number of
# publications and each slot's entry have their own cache line.
LINE_WORDS = ALIGNMENT_BYTES // 8
COUNT = 0


def published_bytes(nbytes: int, slots: int = WEIGHT_SLOTS) -> int:
    """Return the size of the memory of ``PublishedWeights`` for weights of ``nbytes``."""
    return (1 + slots) * ALIGNMENT_BYTES + slots * aligned(nbytes)


class PublishedWeights:
    """The weights of one server, in memory that workers on the same host can read.

    ``nbytes`` is the size of the weights. ``memory`` is an aligned array of
    ``published_bytes(nbytes, slots)`` uint8, initially zero.
    """

    def __init__(self, memory: np.ndarray, nbytes: int, slots: int = WEIGHT_SLOTS) -> None:
        header = (1 + slots) * ALIGNMENT_BYTES
        # Items of a memoryview are read and written atomically.
        self._words = memory[:header].data.cast("q")
        self._slots = [
            memory[start : start + nbytes]
            for start in range(header, header + slots * aligned(nbytes), aligned(nbytes))
        ]

    def write(self, fill: Callable[[np.ndarray], None], version: int) -> None:
        """Publish the weights that ``fill`` writes to its argument. Only one writer is allowed."""
        number = self._words[COUNT] + 1
        slot = number % len(self._slots)
        # Readers depend on the order of these writes.
        line = (1 + slot) * LINE_WORDS
        self._words[line] = 0
        fill(self._slots[slot])
        self._words[line + 1] = version
        self._words[line] = number
        self._words[COUNT] = number

    @property
    def newest(self) -> np.ndarray:
        """The newest weights. Only the server, which writes them, may use this."""
        return self._slots[self._words[COUNT] % len(self._slots)]

    def read(self, buffer: np.ndarray) -> int:
        """Copy the newest weights to ``buffer``, and return their version.

        Raises:
            CollectiveError: If the weights were overwritten during every attempt.
        """
        for _ in range(MAX_READS):
            number = self._words[COUNT]
            slot = number % len(self._slots)
            line = (1 + slot) * LINE_WORDS
            version = self._words[line + 1]
            np.copyto(buffer, self._slots[slot])
            if self._words[line] == number and self._words[line + 1] == version:
                return int(version)
        raise CollectiveError(
            f"Weights were overwritten while this rank read them, {MAX_READS} times in a row; "
            "this is a bug in hvdtrain."
        )


class SharedMemory(NamedTuple):
    """The memory that this rank shares with other ranks on its host."""

    # The weights of each server on this host. If this rank is a server, its own weights are
    # included.
    published: Mapping[int, PublishedWeights]
    readers: frozenset[int]  # the ranks that can read this rank's weights
    # Buffers for dense gradients. On a worker, a key is a server. On a server, a key is a worker.
    slots: Mapping[int, Sequence[np.ndarray]]


def share_memory(
    collectives: Engine, servers: Sequence[int], shards: Sequence[Shard]
) -> SharedMemory:
    """Allocate memory for servers' weights and workers' gradients. All ranks must call this."""
    sizes = {server: shard.nbytes for server, shard in zip(servers, shards)}
    rank = collectives.member
    memory = collectives.share(published_bytes(sizes[rank]) if rank in sizes else 0)
    near = {server: nbytes for server, nbytes in sizes.items() if server in memory}
    published = {server: PublishedWeights(memory[server], near[server]) for server in near}
    if rank in sizes and rank not in published:
        own = BufferPool().take(published_bytes(sizes[rank], slots=1))
        own.fill(0)
        published[rank] = PublishedWeights(own, sizes[rank], slots=1)
    return SharedMemory(published, frozenset(memory), _share_slots(collectives, sizes, near))


def _share_slots(
    collectives: Engine, sizes: Mapping[int, int], near: Mapping[int, int]
) -> Mapping[int, Sequence[np.ndarray]]:
    """Allocate shared memory for gradients. All ranks must call this.

    ``sizes`` maps every server to the size of its shard in bytes. ``near`` contains only the
    servers on this host.
    """
    strides = [GRADIENT_SLOTS * aligned(nbytes) for nbytes in near.values()]
    starts = dict(zip(near, itertools.accumulate(strides, initial=0)))
    rank = collectives.member
    memory = collectives.share(0 if rank in sizes else sum(strides))

    def slots(worker: int, server: int) -> Sequence[np.ndarray]:
        first, nbytes = starts[server], sizes[server]
        offsets = range(first, first + GRADIENT_SLOTS * aligned(nbytes), aligned(nbytes))
        return [memory[worker][offset : offset + nbytes] for offset in offsets]

    if rank in sizes:
        return {worker: slots(worker, rank) for worker in memory if worker not in sizes and near}
    return {server: slots(rank, server) for server in near if memory}
