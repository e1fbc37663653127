"""Memory in which workers hand gradients to servers of their host, which read them where they lie.

It is the workers' own, so that a server needs no more for more of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.collectives.fusion import ALIGNMENT_BYTES
from hvdtrain.collectives.interface import Collectives
from hvdtrain.parameter_server.sharding import Shard

__all__ = ["SLOTS", "Slots", "share_slots"]

# A worker fills one while a server may still read the other.
SLOTS = 2

Slots = Sequence[np.ndarray]
"""Buffers of one shard."""


def share_slots(
    collectives: Collectives, servers: Sequence[int], shards: Sequence[Shard], near: frozenset[int]
) -> Mapping[int, Slots]:
    """Set up slots for the gradients of all workers; collective.

    Args:
        collectives: The engine.
        servers: By rank.
        shards: What each of them holds.
        near: The ranks of this host that share memory; see ``SharedWeights``.

    Returns:
        On a worker, by server, its slots; on a server, by worker, that one's. Empty where ranks
        can't share memory.
    """
    sizes = {
        server: -(-shard.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for server, shard in zip(servers, shards)
        if server in near
    }
    me = collectives.member
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0)))
    memory = collectives.share(0 if me in servers else SLOTS * sum(sizes.values()))

    def slots(worker: int, server: int) -> Slots:
        nbytes = shards[servers.index(server)].nbytes
        first = SLOTS * starts[server]
        places = range(first, first + SLOTS * sizes[server], sizes[server])
        return [memory[worker][place : place + nbytes] for place in places]

    if me in servers:
        return {worker: slots(worker, me) for worker in memory if worker not in servers}
    return {server: slots(me, server) for server in sizes if memory}
