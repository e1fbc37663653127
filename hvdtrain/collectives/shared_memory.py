"""The transport that uses shared memory inside a host and MPI between hosts.

Ranks of a host exchange arrays chunk by chunk, so that each rank finds the data of the other ranks
in the cache. They copy chunks to a shared window, in which every rank owns some slots. Each rank of
the host combines one share of every chunk. A rank does the following with a chunk, in stages:

    pack      copy to its slot the shares of its chunk that other ranks combine
    reduce    combine its own share, from its own array and the slots of the other ranks
    network   (several hosts) combine the result with other hosts. A cross group has one rank per
              host. Each cross group exchanges a share of every chunk or, with many hosts, a larger
              share of some chunks. The first cross group exchanges small arrays.
    unpack    copy the result to the output

On a single host, large results lie in an ``Arena``. Each rank writes its share of the result to the
outputs of all ranks, so that unpacking is not needed.

The stages of consecutive chunks overlap: while chunk c is packed, chunk c-1 is reduced, and so on,
so that ranks seldom wait. With four or more slots, no stage can overwrite memory that another rank
still needs. A comment in ``allreduce`` explains why.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.direct_allreduce import DirectAllreduce, Transfer, chunks_ahead
from hvdtrain.collectives.fusion import pack, split_evenly, unpack
from hvdtrain.collectives.host_memory import LEAST_SLOTS, open_arena, open_window
from hvdtrain.collectives.kernels import accumulator_dtype, combine, finish_average
from hvdtrain.collectives.mpi import MpiTransport
from hvdtrain.collectives.shared_file import free_bytes
from hvdtrain.collectives.small_allreduce import SmallAllreduce
from hvdtrain.collectives.transport import Reduction
from hvdtrain.collectives.tuning import (
    CHUNK_BYTES,
    Link,
    choose_chunk_bytes,
    choose_turns,
    fit_chunk_bytes,
    plan_hierarchy,
)

__all__ = ["SharedMemoryTransport"]

logger = logging.getLogger(__package__)

# Words of a rank, each on its own cache line. The first four are counters: chunks packed, reduced,
# and returned from the network, and operations completed. The last four have two entries, because a
# rank can be one operation ahead: the digest of the call, whether all hosts agree, whether a result
# is not finite, and the result's position in the arena.
LINE_WORDS = 8
PACKED, REDUCED, RETURNED, COMPLETED, DIGESTS, AGREED, NON_FINITE, PLACES = range(
    0, 8 * LINE_WORDS, LINE_WORDS
)

# A placeholder: on a single host, no messages are sent.
NO_LINK = Link(latency_s=1e-6, bytes_per_s=1e10)

# Minimum number of further chunks in transfer between hosts, so that links don't wait for packing.
LEAST_AWAY = 2

# Smaller results stay in private memory, because that is faster.
LEAST_IN_ARENA = 256 << 10

# More than any window needs. This fits into an int64, which MPI sends.
MOST_FREE_BYTES = 1 << 50


@dataclass
class _Job:
    """An allreduce in progress."""

    reduction: Reduction
    slots: Sequence[Sequence[np.ndarray]]
    results: Sequence[np.ndarray]
    scratch: np.ndarray
    base: int  # number of chunks of earlier operations
    in_arena: bool = False  # whether the outputs of all ranks are in the arena
    sums: np.ndarray | None = None  # this rank's output in the arena, if sums can be computed in it
    others: Sequence[np.ndarray] = ()  # outputs in the arena to which this rank copies its sums
    # transfers between hosts in progress, by chunk number
    transfers: dict[int, Transfer] = field(default_factory=dict)


class SharedMemoryTransport(MpiTransport):
    """Reduces arrays through shared memory, and uses MPI messages for all other operations."""

    kind = "shared_memory"
    least_in_arena = LEAST_IN_ARENA

    def _measure_link(self, comm: Any) -> Link:
        one_host = comm.Get_size() == self._local_size
        return NO_LINK if one_host else super()._measure_link(comm)

    def _choose_chunk_bytes(self, comm: Any) -> int:
        return choose_chunk_bytes(len(set(self._host_of)), self._most_chunk_bytes(comm))

    def _most_chunk_bytes(self, comm: Any) -> int:
        """Return the largest chunk size for which every host has enough memory."""
        free = free_bytes()
        free = MOST_FREE_BYTES if free is None else min(free, MOST_FREE_BYTES)
        return self._least(comm, free // 2 // LEAST_SLOTS // (self._local_size + 1))

    def _least(self, comm: Any, number: int) -> int:
        """Return the minimum of ``number`` over all ranks."""
        least = np.array([number], np.int64)
        comm.Allreduce(self._mpi.IN_PLACE, least, self._mpi.MIN)
        return int(least[0])

    def _share_memory(self, comm: Any) -> bool:
        host = self._host
        wanted_bytes = self.chunk_bytes
        self.chunk_bytes = fit_chunk_bytes(wanted_bytes, self._most_chunk_bytes(comm))
        plan = plan_hierarchy(range(self.ranks.size), self._host_of, comm.Get_rank())
        away = 0
        if plan.hosts > 1:
            turns = choose_turns(plan.hosts, plan.cross_groups, self.chunk_bytes)
            away = max(LEAST_AWAY, turns)
        window = open_window(self._mpi, host, self.chunk_bytes, away)
        has_window = bool(self._least(comm, window is not None))
        if self.ranks.rank == 0 and self._parent is None:
            self._warn_of_little_memory(has_window, wanted_bytes)
        if window is None or not has_window:
            return False
        self._window = window
        # Slots limit how many chunks can be in transfer at a time, and so the number of turns.
        self._most_turns = self._least(comm, self._window.slots) - LEAST_SLOTS + 1
        self._arena = open_arena(self._mpi, host) if host.Get_size() == self.ranks.size else None
        return True

    def _warn_of_little_memory(self, has_window: bool, wanted_bytes: int) -> None:
        if has_window and self.chunk_bytes >= min(wanted_bytes, CHUNK_BYTES):
            return
        fallback = "use smaller chunks" if has_window else "send messages instead"
        logger.warning(
            "too little shared memory: ranks of a host %s, which is slower. /dev/shm should have "
            "200 MB free on every host (`hvdtrain check` lists hosts with less; for a container: "
            "docker run --shm-size=1g)",
            fallback,
        )

    def free(self) -> None:
        """Free communicators and shared memory. All ranks must call this."""
        super().free()
        if self.ranks.survives_losses:
            return
        self._window.free()
        # Views would keep the memory mapped.
        self._views.clear()
        self._words.clear()
        self._own_words = memoryview(b"")
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _communicators(self) -> list[Any]:
        cross = [] if self._cross is None else [self._cross.comm]
        return [*cross, *super()._communicators()]

    @property
    def _parties(self) -> int:
        return self._hosts

    def connect(self, comm: Any, members: Sequence[int]) -> None:
        """Set up everything that depends on the ranks of ``comm``, which must all call this."""
        plan = plan_hierarchy(members, self._host_of, members[comm.Get_rank()])
        self._local_rank, self._window_ranks, self._hosts, self._cross_groups = plan
        super().connect(comm, members)
        self.shares = len(self._window_ranks)
        self._everyone = range(len(self._window_ranks))
        self._views: dict[str, tuple[list[list[np.ndarray]], list[np.ndarray], np.ndarray]] = {}
        self._tickets = 0
        self._words = [self._window.words[rank] for rank in self._window_ranks]
        self._own_words = self._words[self._local_rank]
        if self._arena is not None:
            for lost in set(range(len(self._window.words))) - set(self._window_ranks):
                self._arena.drop_part(lost)
        self._window.clear_words(self._window_ranks[self._local_rank])
        self._window.sync()
        self._cross = self._connect_cross()
        self._speaker: SmallAllreduce | None = None
        if self._cross is not None and self._local_rank == 0:
            self._speaker = self._connect_small(self._cross.comm)
        turns = choose_turns(self._hosts, self._cross_groups, self.chunk_bytes)
        self._turns = min(turns, self._most_turns)
        self._carriers = self._cross_groups // self._turns
        self._ahead = self._chunks_ahead() if self._hosts > 1 else 0
        # No rank may start before all have cleared their words.
        comm.Barrier()

    def start_over(self) -> None:
        """Reset the counters of chunks after an interrupted operation. All ranks must call this."""
        self.comm.Barrier()
        self._tickets = 0
        self._window.clear_words(self._window_ranks[self._local_rank])
        self._window.sync()
        self.comm.Barrier()

    def revoke(self) -> None:
        """Interrupt all ranks that wait on the communicators of this transport."""
        super().revoke()
        if self._cross is not None:
            self._cross.comm.Revoke()

    def _connect_cross(self) -> DirectAllreduce | None:
        if self._hosts == 1:
            return None
        crosses = self._local_rank < self._cross_groups
        color = self._local_rank if crosses else self._mpi.UNDEFINED
        cross = self.comm.Split(color, self.ranks.rank)
        return DirectAllreduce(self._mpi, cross, self.segment_bytes) if crosses else None

    def _chunks_ahead(self) -> int:
        """Return how many chunks to transfer between hosts at a time, limited by the slots."""
        share_bytes = self.chunk_bytes // self._carriers
        ahead = chunks_ahead(self._hosts, share_bytes, self.segment_bytes)
        return min(ahead * self._turns, self._window.slots - LEAST_SLOTS)

    def _slot_views(
        self, dtype: np.dtype
    ) -> tuple[list[list[np.ndarray]], list[np.ndarray], np.ndarray]:
        """Return the slots of each local rank, the result slots and a scratch array for a dtype."""
        views = self._views.get(dtype.name)
        if views is None:
            wide = accumulator_dtype(dtype)
            numbers = range(self._window.slots)
            slots = [
                [self._window.slot(rank, n, dtype) for n in numbers] for rank in self._window_ranks
            ]
            results = [self._window.result(n, wide) for n in numbers]
            views = slots, results, np.empty(results[0].size, wide)
            self._views[dtype.name] = views
        return views

    def take_buffer(self, nbytes: int) -> np.ndarray:
        """Return an unused flat uint8 array for results. A large one is in the arena if it fits."""
        if self._arena is not None and nbytes >= self.least_in_arena:
            with contextlib.suppress(MemoryError):
                return self._arena.pool.take(nbytes)
        return super().take_buffer(nbytes)

    def agree(self, call: Call) -> bool:
        """Wait until every rank has made a call, and return whether all calls are the same."""
        self._announce(call)
        self._tickets += 1
        self._signal(PACKED, self._tickets)
        alike = self._host_agrees(self._tickets, call)
        if self._hosts == 1:
            return alike
        if self._speaker is not None:
            self._publish_agreement(self._speaker.agree(call, alike))
        return self._await_agreement(call)

    def _publish_agreement(self, agreed: bool) -> None:
        """Tell the ranks of this host whether all hosts make the same call."""
        self._own_words[AGREED + self.ranks.operation % 2] = agreed
        self._signal(RETURNED, self._tickets)

    def _await_agreement(self, call: Call) -> bool:
        """Wait for the first rank of this host to publish whether all hosts agree."""
        self._wait(RETURNED, range(1), self._tickets, call)
        return bool(self._words[0][AGREED + self.ranks.operation % 2])

    def confirm(self, call: Call) -> None:
        """Wait until every rank has its result of the operation."""
        if self._hosts > 1:
            super().confirm(call)
            return
        self._signal(COMPLETED, self.ranks.operation)
        self._wait(COMPLETED, self._everyone, self.ranks.operation, call)

    def _announce(self, call: Call) -> None:
        """Publish the digest of this rank's call."""
        self._own_words[DIGESTS + self.ranks.operation % 2] = call.digest
        self._own_words[NON_FINITE + self.ranks.operation % 2] = False
        self._window.sync()

    def _host_agrees(self, ticket: int, call: Call) -> bool:
        """Wait for all ranks of this host, and return whether they made the same call."""
        self._wait(PACKED, self._everyone, ticket, call)
        # A rank that is one operation ahead uses the other word.
        word = DIGESTS + self.ranks.operation % 2
        return all(words[word] == call.digest for words in self._words)

    def _wait(self, counter: int, ranks: range, target: int, call: Call) -> None:
        for rank in ranks:
            words = self._words[rank]
            if words[counter] < target:
                reached = functools.partial(self._is_reached, words, counter, target)
                self._spin_wait.until(reached, call.short_text)
        self._window.sync()

    def _is_reached(self, words: memoryview, counter: int, target: int) -> bool:
        if self._cross is not None:
            # Other hosts may be waiting for data from this rank.
            self._cross.progress()
        return bool(words[counter] >= target)

    def _signal(self, counter: int, value: int) -> None:
        self._window.sync()
        self._own_words[counter] = value

    def allreduce(self, reduction: Reduction) -> bool:
        """Combine the inputs of all ranks, chunk by chunk.

        Each step packs one chunk, reduces the previous chunk, and so on. Several chunks are in
        transfer between hosts at a time, so that links are never idle.

        Returns:
            False if not all ranks made the same call, otherwise True.
        """
        if self._hosts > 1 and self._is_small(reduction):
            return self._allreduce_small(reduction)
        job = self._begin(reduction)
        if job is None:
            return False
        chunks = len(reduction.layout.chunks)
        # The number of steps from packing a chunk to unpacking it. ``last + 1`` slots are enough.
        # In step s, a rank packs chunk s into the slot of chunk s - last - 1. It has unpacked that
        # chunk in step s - 1, after all ranks had reduced it. It also reduces chunk s - 1 into the
        # result slot of chunk s - last - 2. By then, every other rank has packed chunk s - 1, so it
        # has finished step s - 2, in which it unpacked that chunk. Results in the arena are not
        # unpacked, but ranks wait at the same point. Hosts may have different numbers of chunks in
        # transfer, because a transfer only waits for earlier transfers.
        last = 2 if self._hosts == 1 else 3 + self._ahead
        for step in range(chunks + last):
            if step < chunks:
                self._pack(job, step)
            if step == 1 and not self._await_first_chunk(job):
                return False
            if 0 <= step - 1 < chunks:
                self._reduce(job, step - 1)
            if self._cross is not None and 0 <= step - 2 < chunks:
                self._send(self._cross, job, step - 2)
            if self._cross is not None and 0 <= step - 2 - self._ahead < chunks:
                self._receive(self._cross, job, step - 2 - self._ahead)
            if 0 <= step - last < chunks:
                self._unpack(job, step - last)
        self._tickets += chunks
        self._collect_finite(reduction)
        return True

    def _allreduce_small(self, reduction: Reduction) -> bool:
        """Reduce on each host, then exchange the sums between the first ranks of the hosts."""
        self._announce(reduction.call)
        job = _Job(reduction, *self._slot_views(reduction.inputs[0].dtype), self._tickets)
        self._pack(job, 0)
        alike = self._host_agrees(job.base + 1, reduction.call)
        if alike:
            self._reduce(job, 0)
        self._tickets += 1
        if self._speaker is not None:
            self._publish_agreement(self._cross_small(self._speaker, job, alike))
        if not self._await_agreement(reduction.call):
            return False
        self._copy_out(job, 0)
        self._collect_finite(reduction)
        return True

    def _cross_small(self, speaker: SmallAllreduce, job: _Job, alike: bool) -> bool:
        """Combine the sums of all hosts if all calls are the same; return whether they are."""
        reduction = job.reduction
        if not alike:
            return speaker.agree(reduction.call, alike)
        self._wait(REDUCED, self._everyone, job.base + 1, reduction.call)
        total = job.results[0][: reduction.layout.chunks[0].items]
        agreed = speaker.allreduce(reduction.call, total, reduction.op, self.ranks.size)
        if agreed:
            self._check_finite(job, total)
        return agreed

    def _collect_finite(self, reduction: Reduction) -> None:
        if reduction.finite is not None:
            word = NON_FINITE + self.ranks.operation % 2
            reduction.finite.passed = not any(words[word] for words in self._words)

    def _begin(self, reduction: Reduction) -> _Job | None:
        """Announce an allreduce; None if there are several hosts and the calls differ."""
        if self._hosts > 1 and not self.agree(reduction.call):
            return None
        self._announce(reduction.call)
        place = self._arena.place(reduction.outputs[0]) if self._arena is not None else -1
        self._own_words[PLACES + self.ranks.operation % 2] = place
        return _Job(reduction, *self._slot_views(reduction.inputs[0].dtype), self._tickets)

    def _await_first_chunk(self, job: _Job) -> bool:
        """Wait for the first chunk of all ranks, and return whether they made the same call."""
        if not self._host_agrees(job.base + 1, job.reduction.call):
            return False
        self._find_buffers(job)
        return True

    def _pack(self, job: _Job, number: int) -> None:
        slot = job.slots[self._local_rank][number % self._window.slots]
        for local_rank, pieces in enumerate(job.reduction.layout.chunks[number].shares):
            if local_rank != self._local_rank:
                pack(pieces, job.reduction.inputs, slot)
        self._signal(PACKED, job.base + number + 1)

    def _reduce(self, job: _Job, number: int) -> None:
        self._wait(PACKED, self._everyone, job.base + number + 1, job.reduction.call)
        result = job.results[number % self._window.slots]
        packed = [slots[number % self._window.slots] for slots in job.slots]
        pieces = job.reduction.layout.chunks[number].shares[self._local_rank]
        for piece in pieces:
            start, stop = piece.chunk_start, piece.chunk_stop
            output = slice(piece.output_start, piece.output_stop)
            contributions = [slot[start:stop] for slot in packed]
            own = job.reduction.inputs[piece.index][piece.start : piece.stop]
            contributions[self._local_rank] = own
            total = result[start:stop] if job.sums is None else job.sums[output]
            combine(contributions, job.reduction.op, total, job.scratch)
            if self._hosts == 1:
                finish_average(total, job.reduction.op, self.ranks.size)
                self._check_finite(job, total)
            for buffer in job.others:
                np.copyto(buffer[output], total, casting="unsafe")
        self._signal(REDUCED, job.base + number + 1)

    def _find_buffers(self, job: _Job) -> None:
        """Find the outputs of all ranks in the arena, if all outputs are there."""
        places = [words[PLACES + self.ranks.operation % 2] for words in self._words]
        if self._arena is None or min(places) < 0:
            return
        nbytes, dtype = job.reduction.layout.output_bytes, job.reduction.inputs[0].dtype
        buffers = [
            self._arena.at(rank, place, nbytes).view(dtype)
            for rank, place in zip(self._window_ranks, places)
        ]
        job.in_arena = True
        # Sums may be computed in this rank's own output, because nobody reads it before it is
        # complete.
        if dtype == accumulator_dtype(dtype):
            job.sums = buffers.pop(self._local_rank)
        job.others = buffers

    def _check_finite(self, job: _Job, share: np.ndarray) -> None:
        """Check a share of the result, and publish whether it is finite."""
        if job.reduction.finite is not None and job.reduction.finite.passed:
            job.reduction.finite.check(share)
            self._own_words[NON_FINITE + self.ranks.operation % 2] = not job.reduction.finite.passed

    def _send(self, cross: DirectAllreduce, job: _Job, number: int) -> None:
        self._wait(REDUCED, self._everyone, job.base + number + 1, job.reduction.call)
        reduction = job.reduction
        total = job.results[number % self._window.slots][: reduction.layout.chunks[number].items]
        share = self._carried(total, self.ranks.operation + number)
        job.transfers[number] = cross.start(
            share, share, reduction.op, self.ranks.size, reduction.wire
        )

    def _carried(self, total: np.ndarray, number: int) -> np.ndarray:
        """Return the share of a host's sums that this rank exchanges with the other hosts.

        The cross groups take turns, and ``number`` counts the turns. If it is not the turn of this
        rank's cross group, the share is empty.
        """
        first = number % self._turns * self._carriers
        place = self._local_rank - first
        if not 0 <= place < self._carriers:
            return total[:0]
        start, stop = split_evenly(total.size, self._carriers)[place]
        return total[start:stop]

    def _receive(self, cross: DirectAllreduce, job: _Job, number: int) -> None:
        transfer = job.transfers.pop(number)
        self.finish(cross, transfer, job.reduction.call)
        self._check_finite(job, transfer.out)
        self._signal(RETURNED, job.base + number + 1)

    def _unpack(self, job: _Job, number: int) -> None:
        if self._hosts == 1:
            self._wait(REDUCED, self._everyone, job.base + number + 1, job.reduction.call)
        else:
            self._wait(
                RETURNED, range(self._cross_groups), job.base + number + 1, job.reduction.call
            )
        if not job.in_arena:  # otherwise the output is already complete
            self._copy_out(job, number)

    def _copy_out(self, job: _Job, number: int) -> None:
        unpack(
            job.reduction.layout.chunks[number].pieces,
            job.results[number % self._window.slots],
            job.reduction.outputs,
        )
