"""The weights of a server where workers of its host read them, without asking or waiting.

The memory holds a few slots. Each publication goes into the oldest one, whose number is taken away
meanwhile; a reader takes the newest, and begins again if its number has changed until the copy is
made (a seqlock: Lameter 2005, "Effective synchronization on Linux/NUMA systems"). So neither side
ever waits for the other, and the slots are enough for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.fusion import ALIGNMENT_BYTES, BufferPool
from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import CollectiveError
from hvdtrain.parameter_server.sharding import Shard

__all__ = ["PublishedWeights", "SharedWeights", "published_bytes", "share_weights"]

# A reader begins again only if this many less one publications are made during one copy.
SLOTS = 3
MOST_READS = 1000

# Words: how many publications there are; then for each slot which one it holds, 0 while it is
# written, and its version. Each on a cache line of its own.
LINE_WORDS = ALIGNMENT_BYTES // 8
COUNT = 0


def published_bytes(nbytes: int, slots: int = SLOTS) -> int:
    """How much memory ``PublishedWeights`` takes for weights of ``nbytes``."""
    return (1 + slots) * ALIGNMENT_BYTES + slots * _stride(nbytes)


class PublishedWeights:
    """One server's weights, for whoever sees the memory.

    Args:
        memory: uint8, aligned, of ``published_bytes``, zero at first; a server's own, or one that
            others see.
        nbytes: Of the weights.
        slots: As for ``published_bytes``.
    """

    def __init__(self, memory: np.ndarray, nbytes: int, slots: int = SLOTS) -> None:
        header = (1 + slots) * ALIGNMENT_BYTES
        # Python's own integers: an item is read and written at once.
        self._words = memory[:header].data.cast("q")
        self._slots = [
            memory[start : start + nbytes]
            for start in range(header, header + slots * _stride(nbytes), _stride(nbytes))
        ]

    def write(self, fill: Callable[[np.ndarray], None], version: int) -> None:
        """Publish weights; one rank alone may do so.

        Args:
            fill: Writes them to a buffer.
            version: Of the weights.
        """
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


class SharedWeights(NamedTuple):
    """Which weights are read where they lie.

    Attributes:
        published: By server, where its weights are put; of the servers that this rank sees, and
            of this rank if it serves.
        readers: The ranks that read what this one publishes.
    """

    published: dict[int, PublishedWeights]
    readers: frozenset[int]


def share_weights(
    collectives: Collectives,
    servers: Sequence[int],
    shards: Sequence[Shard],
    *,
    readable: bool = True,
) -> SharedWeights:
    """Set up memory for the weights of all servers; collective.

    Args:
        collectives: The engine.
        servers: By rank.
        shards: What each of them holds.
        readable: Let workers of a server's host read them.
    """
    sizes = {server: shard.nbytes for server, shard in zip(servers, shards)}
    me = collectives.member
    mine = published_bytes(sizes[me]) if me in sizes else 0
    memory = collectives.share(mine) if readable else {}
    published = {
        server: PublishedWeights(memory[server], nbytes)
        for server, nbytes in sizes.items()
        if server in memory
    }
    if me in sizes and me not in published:
        own = BufferPool().take(published_bytes(sizes[me], slots=1))
        own.fill(0)
        published[me] = PublishedWeights(own, sizes[me], slots=1)
    return SharedWeights(published, frozenset(memory))


def _stride(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
