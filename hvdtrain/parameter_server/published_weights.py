"""Memory that workers and servers of one host share: gradients one way, weights the other.

Dense gradients stay in the worker's own memory, where servers read them, so that a server needs no
more memory for more workers. A server's weights are read without asking or waiting: each
publication goes into the oldest of a few slots, whose number is taken away meanwhile; a reader
takes the newest, and begins again if its number has changed until the copy is made (a seqlock:
Lameter 2005, "Effective synchronization on Linux/NUMA systems"). So neither side ever waits for the
other, and the slots are enough for any number of workers.
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

__all__ = [
    "GRADIENT_SLOTS",
    "PublishedWeights",
    "SharedMemory",
    "Slots",
    "published_bytes",
    "share_memory",
]

# A worker fills one while a server may still read the other.
GRADIENT_SLOTS = 2
# A reader begins again only if this many less one publications are made during one copy.
WEIGHT_SLOTS = 3
MOST_READS = 1000

# Words: how many publications there are; then for each slot which one it holds, 0 while it is
# written, and its version. Each on a cache line of its own.
LINE_WORDS = ALIGNMENT_BYTES // 8
COUNT = 0

Slots = Sequence[np.ndarray]
"""Buffers of one shard, for the gradients of one worker."""


def published_bytes(nbytes: int, slots: int = WEIGHT_SLOTS) -> int:
    """Returns how much memory ``PublishedWeights`` takes for weights of ``nbytes``."""
    return (1 + slots) * ALIGNMENT_BYTES + slots * aligned(nbytes)


class PublishedWeights:
    """One server's weights of ``nbytes``, for whoever sees the memory.

    ``memory`` is uint8, aligned, of ``published_bytes``, and zero at first; a server's own, or one
    that others see.
    """

    def __init__(self, memory: np.ndarray, nbytes: int, slots: int = WEIGHT_SLOTS) -> None:
        header = (1 + slots) * ALIGNMENT_BYTES
        # Python's own integers: an item is read and written at once.
        self._words = memory[:header].data.cast("q")
        self._slots = [
            memory[start : start + nbytes]
            for start in range(header, header + slots * aligned(nbytes), aligned(nbytes))
        ]

    def write(self, fill: Callable[[np.ndarray], None], version: int) -> None:
        """Publish weights, which ``fill`` writes to a buffer; one rank alone may do so."""
        number = self._words[COUNT] + 1
        slot = number % len(self._slots)
        # Each line is written after the one before it, and seen so.
        line = (1 + slot) * LINE_WORDS
        self._words[line] = 0
        fill(self._slots[slot])
        self._words[line + 1] = version
        self._words[line] = number
        self._words[COUNT] = number

    @property
    def newest(self) -> np.ndarray:
        """The weights that were written last, for the rank that writes them."""
        return self._slots[self._words[COUNT] % len(self._slots)]

    def read(self, buffer: np.ndarray) -> int:
        """Copy the newest weights to ``buffer``; returns their version.

        Raises:
            CollectiveError: They can't be had in one piece.
        """
        for _ in range(MOST_READS):
            number = self._words[COUNT]
            slot = number % len(self._slots)
            line = (1 + slot) * LINE_WORDS
            version = self._words[line + 1]
            np.copyto(buffer, self._slots[slot])
            if self._words[line] == number and self._words[line + 1] == version:
                return int(version)
        raise CollectiveError(
            f"Weights were overwritten while this rank read them, {MOST_READS} times in a row; "
            "this is an error of hvdtrain."
        )


class SharedMemory(NamedTuple):
    """The memory that this rank shares with others of its host.

    Attributes:
        published: By server, where its weights are put; of the servers that this rank sees, and
            of this rank if it serves.
        readers: The ranks that read what this one publishes.
        slots: On a worker, by server, where its dense gradients are read; on a server, by worker,
            where that one's are.
    """

    published: Mapping[int, PublishedWeights]
    readers: frozenset[int]
    slots: Mapping[int, Slots]


def share_memory(
    collectives: Engine, servers: Sequence[int], shards: Sequence[Shard]
) -> SharedMemory:
    """Set up memory for the weights of all servers and the gradients of all workers; collective."""
    sizes = {server: shard.nbytes for server, shard in zip(servers, shards)}
    me = collectives.member
    mine = published_bytes(sizes[me]) if me in sizes else 0
    memory = collectives.share(mine)
    near = {server: nbytes for server, nbytes in sizes.items() if server in memory}
    published = {server: PublishedWeights(memory[server], near[server]) for server in near}
    if me in sizes and me not in published:
        own = BufferPool().take(published_bytes(sizes[me], slots=1))
        own.fill(0)
        published[me] = PublishedWeights(own, sizes[me], slots=1)
    slots = _share_slots(collectives, sizes, near)
    return SharedMemory(published, frozenset(memory), slots)


def _share_slots(
    collectives: Engine, sizes: Mapping[int, int], near: Mapping[int, int]
) -> Mapping[int, Slots]:
    """Set up slots for gradients; collective.

    ``sizes`` are the bytes of each server's shard, ``near`` those of the servers whose memory this
    rank sees.
    """
    strides = [GRADIENT_SLOTS * aligned(nbytes) for nbytes in near.values()]
    starts = dict(zip(near, itertools.accumulate(strides, initial=0)))
    me = collectives.member
    memory = collectives.share(0 if me in sizes else sum(strides))

    def slots(worker: int, server: int) -> Slots:
        first, nbytes = starts[server], sizes[server]
        places = range(first, first + GRADIENT_SLOTS * aligned(nbytes), aligned(nbytes))
        return [memory[worker][place : place + nbytes] for place in places]

    if me in sizes:
        return {worker: slots(worker, me) for worker in memory if worker not in sizes and near}
    return {server: slots(me, server) for server in near if memory}
