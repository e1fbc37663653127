"""Two levels: shared memory inside a host, MPI between hosts.

Every rank of a host owns a few slots of an MPI-3 shared window. A group of arrays travels
through them chunk by chunk, so that what one rank writes the others find in the cache:

    pack      copy what the other ranks of the host combine from my chunk into my slot
    reduce    combine my share of the chunk: my own array and the others' slots
    network   (more than one host) combine that with other hosts; each cross group carries a share,
              of many hosts a larger one of each of its turns, and the first alone what is small
    unpack    copy the result out

Where one host has all ranks and their results lie in memory that all of them see (see ``Arena``),
each rank writes its share of a result to everyone, and nothing is left to unpack.

The stages of consecutive chunks overlap: while chunk c is packed, chunk c-1 is reduced, and so
on, so that a rank seldom waits for the others' latest stage. From four slots on no stage can reach
memory that another rank still needs; ``allreduce`` says why.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.collectives.arena import ForkedCopies, open_arena
from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.direct_allreduce import DirectAllreduce, Transfer, chunks_ahead
from hvdtrain.collectives.fusion import BufferPool, pack, split_evenly, unpack
from hvdtrain.collectives.hierarchy import (
    CHUNK_BYTES,
    choose_chunk_bytes,
    choose_turns,
    fit_chunk_bytes,
    plan_hierarchy,
)
from hvdtrain.collectives.host_window import LEAST_SLOTS, open_window
from hvdtrain.collectives.kernels import accumulator_dtype, combine, finish_average
from hvdtrain.collectives.link_speed import Link
from hvdtrain.collectives.mpi import MpiTransport
from hvdtrain.collectives.shared_file import free_bytes
from hvdtrain.collectives.small_allreduce import SmallAllreduce
from hvdtrain.collectives.transport import Reduction

__all__ = ["SharedMemoryTransport"]

logger = logging.getLogger(__package__)

# Counters, each on a cache line of its own: chunks packed, reduced, back from the network; and
# operations whose result a rank holds. For the latest two calls, as a rank can be one ahead: their
# digests, whether other hosts made the same, whether a result is not finite, and where in the arena
# it will lie.
LINE_WORDS = 8
PACKED, REDUCED, RETURNED, HELD, DIGESTS, AGREED, NON_FINITE, PLACES = range(
    0, 8 * LINE_WORDS, LINE_WORDS
)

# What is taken for the speed where there is one host, and nothing crosses a link.
NO_LINK = Link(latency_s=1e-6, bytes_per_s=1e10)

# Chunks that are on their way between hosts beside the first, so that links don't wait for packing.
LEAST_AWAY = 2

# Smaller results are quicker in memory of a rank's own.
LEAST_IN_ARENA = 256 << 10

# For numbers that MPI's messages hold; no window needs more.
MOST_ROOM_BYTES = 1 << 50


@dataclass
class _Job:
    """One allreduce on its way through the slots.

    Attributes:
        in_arena: Whether the results of all ranks lie in the arena.
        sums: Where totals are added up there: this rank's own buffer, if they are of its type.
        others: The buffers that totals are copied to.
        transfers: By chunk, its share on the way between hosts.
    """

    asked: Reduction
    slots: Sequence[Sequence[np.ndarray]]
    results: Sequence[np.ndarray]
    scratch: np.ndarray
    base: int
    in_arena: bool = False
    sums: np.ndarray | None = None
    others: Sequence[np.ndarray] = ()
    transfers: dict[int, Transfer] = field(default_factory=dict)


class SharedMemoryTransport(MpiTransport):
    """Allreduce through shared windows; all else as plain MPI does it."""

    kind = "shared_memory"
    least_in_arena = LEAST_IN_ARENA

    def _measure_link(self, comm: Any) -> Link:
        one_host = comm.Get_size() == self._local_size
        return NO_LINK if one_host else super()._measure_link(comm)

    def _choose_chunk_bytes(self, comm: Any) -> int:
        return choose_chunk_bytes(len(set(self._host_of)), self._most_chunk_bytes(comm))

    def _most_chunk_bytes(self, comm: Any) -> int:
        """Return for how large chunks every host has memory: half of it may be used."""
        free = free_bytes()
        room = MOST_ROOM_BYTES if free is None else min(free, MOST_ROOM_BYTES)
        return self._least(comm, room // 2 // LEAST_SLOTS // (self._local_size + 1))

    def _least(self, comm: Any, number: int) -> int:
        """The least of all ranks' numbers: hosts have different memory, and must do the same."""
        least = np.array([number], np.int64)
        comm.Allreduce(self._mpi.IN_PLACE, least, self._mpi.MIN)
        return int(least[0])

    def _share_memory(self, comm: Any) -> bool:
        host = self._host
        wanted_bytes = self.chunk_bytes
        self.chunk_bytes = fit_chunk_bytes(wanted_bytes, self._most_chunk_bytes(comm))
        where = plan_hierarchy(range(self.ranks.size), self._host_of, comm.Get_rank())
        away = 0
        if where.hosts > 1:
            turns = choose_turns(where.hosts, where.cross_groups, self.chunk_bytes)
            away = max(LEAST_AWAY, turns)
        window = open_window(self._mpi, host, self.chunk_bytes, away)
        has_window = bool(self._least(comm, window is not None))
        if self.ranks.rank == 0 and self._parent is None:
            self._warn_of_little_memory(has_window, wanted_bytes)
        if window is None or not has_window:
            return False
        self._window = window
        # As many chunks can be between hosts at a time.
        self._most_turns = self._least(comm, self._window.slots) - LEAST_SLOTS + 1
        self._arena = open_arena(self._mpi, host) if host.Get_size() == self.ranks.size else None
        if self._arena is not None:
            self._arena_pool = BufferPool(empty=self._arena.empty, drop=self._arena.drop)
            self._forked_copies = ForkedCopies(self._arena_pool.held, self._arena.own)
        return True

    def _warn_of_little_memory(self, has_window: bool, wanted_bytes: int) -> None:
        if has_window and self.chunk_bytes >= min(wanted_bytes, CHUNK_BYTES):
            return
        instead = "exchange less at a time" if has_window else "send messages instead"
        logger.warning(
            "too little shared memory: ranks of a host %s, which is slower. /dev/shm should have "
            "200 MB free on every host (`hvdtrain check` names those that have less; for a "
            "container: docker run --shm-size=1g)",
            instead,
        )

    def free(self) -> None:
        super().free()
        if self.ranks.survives_losses:
            return
        self._window.free()
        # Views keep the memory from being unmapped.
        self._views.clear()
        self._words.clear()
        self._mine = memoryview(b"")
        if self._arena is not None:
            self._arena = None
            del self._arena_pool, self._forked_copies

    def _communicators(self) -> list[Any]:
        cross = [] if self._cross is None else [self._cross.comm]
        return [*cross, *super()._communicators()]

    @property
    def _parties(self) -> int:
        return self._hosts

    def connect(self, comm: Any, members: Sequence[int]) -> None:
        where = plan_hierarchy(members, self._host_of, members[comm.Get_rank()])
        self._local_rank, self._window_ranks, self._hosts, self._cross_groups = where
        super().connect(comm, members)
        self.shares = len(self._window_ranks)
        self._everyone = range(len(self._window_ranks))
        self._views: dict[str, tuple[list[list[np.ndarray]], list[np.ndarray], np.ndarray]] = {}
        self._tickets = 0
        self._words = [self._window.words[rank] for rank in self._window_ranks]
        self._mine = self._words[self._local_rank]
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
        # Nobody begins before all have cleared their words.
        comm.Barrier()

    def start_over(self) -> None:
        # Ranks have packed different numbers of chunks.
        self.comm.Barrier()
        self._tickets = 0
        self._window.clear_words(self._window_ranks[self._local_rank])
        self._window.sync()
        self.comm.Barrier()

    def revoke(self) -> None:
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
        """Return how many chunks to have on their way between hosts, as far as there are slots."""
        share_bytes = self.chunk_bytes // self._carriers
        wanted = chunks_ahead(self._hosts, share_bytes, self.segment_bytes)
        return min(wanted * self._turns, self._window.slots - LEAST_SLOTS)

    def _slot_views(
        self, dtype: np.dtype
    ) -> tuple[list[list[np.ndarray]], list[np.ndarray], np.ndarray]:
        """Return the window as ``dtype`` per local rank and slot; result slots; a scratch array."""
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
        if self._arena is not None and nbytes >= self.least_in_arena:
            with contextlib.suppress(MemoryError):
                return self._arena_pool.take(nbytes)
        return super().take_buffer(nbytes)

    def agree(self, call: Call) -> bool:
        self._announce(call)
        self._tickets += 1
        self._signal(PACKED, self._tickets)
        alike = self._host_agrees(self._tickets, call)
        if self._hosts == 1:
            return alike
        if self._speaker is not None:
            self._tell_host(self._speaker.agree(call, alike))
        return self._hear_hosts(call)

    def _tell_host(self, agreed: bool) -> None:
        """Say whether all hosts make the same call; the rank that speaks for this one knows."""
        self._mine[AGREED + self.ranks.operation % 2] = agreed
        self._signal(RETURNED, self._tickets)

    def _hear_hosts(self, call: Call) -> bool:
        """Wait until that has been said, and return it."""
        self._wait(RETURNED, range(1), self._tickets, call)
        return bool(self._words[0][AGREED + self.ranks.operation % 2])

    def confirm(self, call: Call) -> None:
        if self._hosts > 1:
            super().confirm(call)
            return
        self._signal(HELD, self.ranks.operation)
        self._wait(HELD, self._everyone, self.ranks.operation, call)

    def _announce(self, call: Call) -> None:
        """Write this rank's call where the others compare it with theirs."""
        self._mine[DIGESTS + self.ranks.operation % 2] = call.digest
        self._mine[NON_FINITE + self.ranks.operation % 2] = False
        self._window.sync()

    def _host_agrees(self, ticket: int, call: Call) -> bool:
        """Wait for all ranks of this host: whether they made the same call."""
        self._wait(PACKED, self._everyone, ticket, call)
        # A rank can be one operation ahead, which then lies in the other word of the two.
        word = DIGESTS + self.ranks.operation % 2
        return all(words[word] == call.digest for words in self._words)

    def _wait(self, counter: int, ranks: range, target: int, call: Call) -> None:
        for rank in ranks:
            words = self._words[rank]
            if words[counter] < target:
                come = functools.partial(self._has_come, words, counter, target)
                self._spin_wait.until(come, call.short_text)
        self._window.sync()

    def _has_come(self, words: memoryview, counter: int, target: int) -> bool:
        if self._cross is not None:
            # The other hosts wait for what this rank is to pass on meanwhile.
            self._cross.progress()
        return bool(words[counter] >= target)

    def _signal(self, counter: int, value: int) -> None:
        self._window.sync()
        self._mine[counter] = value

    def allreduce(self, asked: Reduction) -> bool:
        """Send all chunks through the stages, the next one a stage behind.

        Between hosts several are on their way at a time, so that links are never idle.

        Why ``last + 1`` slots are enough. In step s a rank packs chunk s into the slot that held
        chunk s - last - 1. It has unpacked that one in step s-1, for which all ranks had reduced
        it. It also reduces chunk s-1 into the result slot of chunk s - last - 2; every other rank
        has packed chunk s-1 by then, so has finished its step s-2 and with it unpacking that one.
        Results in the arena are not unpacked, but ranks wait there as long. Hosts may differ in how
        many chunks they have on the way: a transfer starts after waiting for earlier ones alone.
        """
        if self._hosts > 1 and self._is_small(asked):
            return self._allreduce_small(asked)
        job = self._begin(asked)
        if job is None:
            return False
        chunks = len(asked.layout.chunks)
        # How many chunks unpacking lags behind packing.
        last = 2 if self._hosts == 1 else 3 + self._ahead
        for step in range(chunks + last):
            if step < chunks:
                self._pack(job, step)
            if step == 1 and not self._all_have_begun(job):
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
        self._see_non_finite(asked)
        return True

    def _allreduce_small(self, asked: Reduction) -> bool:
        """Let the first rank of each host exchange what its ranks have added up."""
        self._announce(asked.call)
        job = _Job(asked, *self._slot_views(asked.inputs[0].dtype), self._tickets)
        self._pack(job, 0)
        alike = self._host_agrees(job.base + 1, asked.call)
        if alike:
            self._reduce(job, 0)
        self._tickets += 1
        if self._speaker is not None:
            self._tell_host(self._cross_small(self._speaker, job, alike))
        if not self._hear_hosts(asked.call):
            return False
        self._copy_out(job, 0)
        self._see_non_finite(asked)
        return True

    def _cross_small(self, speaker: SmallAllreduce, job: _Job, alike: bool) -> bool:
        """Combine the sums of this host with those of the others, where all make the same call."""
        asked = job.asked
        if not alike:
            return speaker.agree(asked.call, alike)
        self._wait(REDUCED, self._everyone, job.base + 1, asked.call)
        total = job.results[0][: asked.layout.chunks[0].items]
        agreed = speaker.allreduce(asked.call, total, asked.op, self.ranks.size)
        if agreed:
            self._look(job, total)
        return agreed

    def _see_non_finite(self, asked: Reduction) -> None:
        if asked.finite is not None:
            word = NON_FINITE + self.ranks.operation % 2
            asked.finite.passed = not any(words[word] for words in self._words)

    def _begin(self, asked: Reduction) -> _Job | None:
        """Announce an allreduce; None where ranks are known to differ already."""
        if self._hosts > 1 and not self.agree(asked.call):
            return None
        self._announce(asked.call)
        place = self._arena.place(asked.outputs[0]) if self._arena is not None else -1
        self._mine[PLACES + self.ranks.operation % 2] = place
        return _Job(asked, *self._slot_views(asked.inputs[0].dtype), self._tickets)

    def _all_have_begun(self, job: _Job) -> bool:
        """Wait for the first chunk of all ranks: whether they made the same call."""
        if not self._host_agrees(job.base + 1, job.asked.call):
            return False
        self._find_buffers(job)
        return True

    def _pack(self, job: _Job, number: int) -> None:
        slot = job.slots[self._local_rank][number % self._window.slots]
        for local_rank, pieces in enumerate(job.asked.layout.chunks[number].shares):
            if local_rank != self._local_rank:
                pack(pieces, job.asked.inputs, slot)
        self._signal(PACKED, job.base + number + 1)

    def _reduce(self, job: _Job, number: int) -> None:
        self._wait(PACKED, self._everyone, job.base + number + 1, job.asked.call)
        result = job.results[number % self._window.slots]
        packed = [slots[number % self._window.slots] for slots in job.slots]
        pieces = job.asked.layout.chunks[number].shares[self._local_rank]
        for piece in pieces:
            start, stop = piece.chunk_start, piece.chunk_stop
            output = slice(piece.output_start, piece.output_stop)
            contributions = [slot[start:stop] for slot in packed]
            mine = job.asked.inputs[piece.index][piece.start : piece.stop]
            contributions[self._local_rank] = mine
            total = result[start:stop] if job.sums is None else job.sums[output]
            combine(contributions, job.asked.op, total, job.scratch)
            if self._hosts == 1:
                finish_average(total, job.asked.op, self.ranks.size)
                self._look(job, total)
            for buffer in job.others:
                np.copyto(buffer[output], total, casting="unsafe")
        self._signal(REDUCED, job.base + number + 1)

    def _find_buffers(self, job: _Job) -> None:
        """Learn where the others want their results; the same decision on all ranks."""
        places = [words[PLACES + self.ranks.operation % 2] for words in self._words]
        if self._arena is None or min(places) < 0:
            return
        nbytes, dtype = job.asked.layout.output_bytes, job.asked.inputs[0].dtype
        buffers = [
            self._arena.at(rank, place, nbytes).view(dtype)
            for rank, place in zip(self._window_ranks, places)
        ]
        job.in_arena = True
        # Nobody reads my share of my own result before it is complete.
        if dtype == accumulator_dtype(dtype):
            job.sums = buffers.pop(self._local_rank)
        job.others = buffers

    def _look(self, job: _Job, share: np.ndarray) -> None:
        """Tell the ranks of this host whether the share is finite; together they see all."""
        if job.asked.finite is not None and job.asked.finite.passed:
            job.asked.finite.check(share)
            self._mine[NON_FINITE + self.ranks.operation % 2] = not job.asked.finite.passed

    def _send(self, cross: DirectAllreduce, job: _Job, number: int) -> None:
        self._wait(REDUCED, self._everyone, job.base + number + 1, job.asked.call)
        asked = job.asked
        total = job.results[number % self._window.slots][: asked.layout.chunks[number].items]
        share = self._carried(total, self.ranks.operation + number)
        job.transfers[number] = cross.start(share, share, asked.op, self.ranks.size, asked.wire)

    def _carried(self, total: np.ndarray, number: int) -> np.ndarray:
        """Return the share of a host's sums that this rank exchanges with the other hosts.

        Where ranks do so in turns it may be empty; the ``number`` says whose turn it is.
        """
        first = number % self._turns * self._carriers
        place = self._local_rank - first
        if not 0 <= place < self._carriers:
            return total[:0]
        start, stop = split_evenly(total.size, self._carriers)[place]
        return total[start:stop]

    def _receive(self, cross: DirectAllreduce, job: _Job, number: int) -> None:
        transfer = job.transfers.pop(number)
        self.finish(cross, transfer, job.asked.call)
        self._look(job, transfer.out)
        self._signal(RETURNED, job.base + number + 1)

    def _unpack(self, job: _Job, number: int) -> None:
        if self._hosts == 1:
            self._wait(REDUCED, self._everyone, job.base + number + 1, job.asked.call)
        else:
            self._wait(RETURNED, range(self._cross_groups), job.base + number + 1, job.asked.call)
        if not job.in_arena:  # they would have written it
            self._copy_out(job, number)

    def _copy_out(self, job: _Job, number: int) -> None:
        unpack(
            job.asked.layout.chunks[number].pieces,
            job.results[number % self._window.slots],
            job.asked.outputs,
        )
