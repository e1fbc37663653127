"""The arena for results in shared memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.collectives import shared_file
from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.host_memory import Arena, open_arena
from hvdtrain.collectives.shared_file import SharedFile, free_bytes, share_file, share_on_host
from hvdtrain.collectives.shared_memory import LEAST_IN_ARENA
from tests.collectives.engines import EngineCase, everyone, mpi_of_job, new_engine, on_engines
from tests.harness.required import skip_or_fail

PAGE = mmap.PAGESIZE
PART_BYTES = 64 * PAGE
MCL_FUTURE = 2  # of mlockall
ON_TWO_AND_THREE = on_engines(
    [EngineCase(kind="shared_memory", hosts=(0,) * ranks) for ranks in (2, 3)]
)


@pytest.fixture
def file() -> SharedFile:
    """A sparse file of two parts that no other process uses."""
    file = share_file([PART_BYTES] * 2, 0, lambda path: path, lambda opened: opened, sparse=True)
    assert file is not None
    return file


@pytest.fixture
def arena(file: SharedFile) -> Arena:
    """The arena of the second rank."""
    return Arena(file, 1, PART_BYTES)


def test_buffers_do_not_overlap(arena: Arena) -> None:
    buffers = [arena.empty(nbytes) for nbytes in (1, PAGE, PAGE + 1, 5)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number + 1
    for number, buffer in enumerate(buffers):
        assert (buffer == number + 1).all()
    assert [arena.place(buffer) for buffer in buffers] == [0, PAGE, 2 * PAGE, 4 * PAGE]


def test_other_ranks_find_buffers(file: SharedFile, arena: Arena) -> None:
    other = Arena(file, 0, PART_BYTES)
    arena.empty(PAGE)
    buffer = arena.empty(100)
    other.at(1, arena.place(buffer), 100)[:] = 7
    assert (buffer == 7).all()
    assert arena.place(buffer[3:]) == arena.place(buffer) + 3
    assert other.place(buffer) == -1
    assert arena.place(np.empty(3)) == -1


def test_dropped_buffers_free_space_and_memory(file: SharedFile, arena: Arena) -> None:
    first, second, third = (arena.empty(8 * PAGE) for _ in range(3))
    first[:], second[:], third[:] = 1, 2, 3
    held = file.held_bytes
    place = arena.place(second)
    arena.drop(second)
    assert file.held_bytes == held - 8 * PAGE
    assert (first == 1).all()
    assert (third == 3).all()
    assert arena.place(arena.empty(9 * PAGE)) > arena.place(third), "it does not fit into the gap"
    assert arena.place(arena.empty(8 * PAGE)) == place


def test_the_pool_frees_all_but_two_unused_buffers(file: SharedFile, arena: Arena) -> None:
    pool = BufferPool(2, arena.empty, arena.drop)
    for pages in (1, 3, 8, 20, 24):
        buffer = pool.take(pages * PAGE)
        assert arena.place(buffer) >= 0
        buffer[:] = pages
        del buffer
    assert file.held_bytes == (20 + 1 + 24 + 1) * PAGE, "two unused buffers"


@pytest.mark.parametrize("free", [None, 2 * PAGE - 1])
def test_no_buffer_without_free_memory(
    file: SharedFile, arena: Arena, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "free_bytes", lambda: free)
    with pytest.raises(MemoryError, match="arena is full"):
        arena.empty(2 * PAGE)
    assert file.held_bytes == 0
    monkeypatch.undo()
    assert arena.place(arena.empty(2 * PAGE)) == 0


def test_no_buffer_in_a_full_part(arena: Arena) -> None:
    held = arena.empty(PART_BYTES - PAGE)
    with pytest.raises(MemoryError):
        arena.empty(2 * PAGE)
    arena.drop(held)
    assert arena.place(arena.empty(2 * PAGE)) == 0


def test_full_file_system(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may fill the file system before a claim. A failed claim frees its memory."""
    monkeypatch.setattr(shared_file, "SHARED_MEMORY", str(small_disk))
    monkeypatch.setattr(shared_file, "CLAIM_BYTES", 4 * PAGE)
    free = free_bytes()
    assert free
    file = share_file([2 * free], 0, lambda path: path, lambda opened: opened, sparse=True)
    assert file is not None
    assert list(small_disk.iterdir()) == []
    monkeypatch.setattr(shared_file, "free_bytes", lambda: 2 * free)
    assert not file.claim(0, free + PAGE)
    assert file.held_bytes == 0
    assert file.claim(0, free // 2)
    assert file.held_bytes == free // 2


@pytest.mark.ranks(2)
def test_the_arena_is_excluded_from_dumps_and_forks(rank_count: int) -> None:
    mpi = mpi_of_job()
    arena = open_arena(mpi, mpi.COMM_WORLD.Dup())
    assert arena is not None
    address = arena.at(0, 0, 1).ctypes.data
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (head,) = (n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    flags = next(line for line in lines[head:] if line.startswith("VmFlags:"))
    assert {"dd", "dc"} <= set(flags.split())


@pytest.mark.ranks(2)
def test_no_sparse_file_if_the_program_locks_its_memory(rank_count: int) -> None:
    """Locking would allocate the whole file."""
    libc = ctypes.CDLL(None)
    if libc.mlockall(MCL_FUTURE) != 0:
        skip_or_fail("memlock", "this process may not lock its memory")
    try:
        mpi = mpi_of_job()
        file = share_on_host(mpi, mpi.COMM_WORLD.Dup(), [50 * PAGE] * 2, sparse=True)
    finally:
        libc.munlockall()
    assert file is None


@pytest.fixture
def limited_addresses() -> Iterator[None]:
    """Limit the address space of rank 1, as ``ulimit -v`` does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if mpi_of_job().COMM_WORLD.Get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 46, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.ranks(2)
def test_no_arena_with_limited_address_space(rank_count: int, limited_addresses: None) -> None:
    mpi = mpi_of_job()
    assert open_arena(mpi, mpi.COMM_WORLD.Dup()) is None


@ON_TWO_AND_THREE
def test_only_large_results_are_in_the_arena(case: EngineCase) -> None:
    engine = new_engine(case)
    items = LEAST_IN_ARENA // 4
    for count, inside in ((items, True), (items - 16, False)):
        result = engine.allreduce(np.full(count, engine.rank + 1, np.float32))
        assert (result == sum(range(1, engine.size + 1))).all()
        assert (engine.transport._arena.place(result) >= 0) is inside


@ON_TWO_AND_THREE
def test_the_arena_of_a_closed_subset_is_freed_at_once(case: EngineCase) -> None:
    engine = new_engine(case)
    part = engine.subset(range(engine.size))
    part.transport.least_in_arena = 0
    result = part.allreduce(np.ones(9000, np.float32))
    arena = weakref.ref(part.transport._arena)
    gc.disable()
    try:
        part.close()
        assert arena() is None
    finally:
        gc.enable()
    assert (result == engine.size).all()


@ON_TWO_AND_THREE
def test_results_are_copied_while_one_rank_has_no_space(
    case: EngineCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(case)
    engine.transport.least_in_arena = 0
    full = engine.rank == 1
    if full:
        monkeypatch.setattr(SharedFile, "claim", lambda file, start, nbytes: False)
    inputs = [np.full(shape, engine.rank, np.float32) for shape in ((700,), (9, 300), ())]
    results = engine.grouped_allreduce(inputs, "average")
    assert (engine.transport._arena.place(results[0]) == -1) is full
    for result in results:
        assert (result == (engine.size - 1) / 2).all()
    monkeypatch.undo()
    again = engine.grouped_allreduce([np.ones((30, 300), np.float16)])
    assert (again[0] == engine.size).all()
    assert all(everyone(engine.size, engine.transport._arena.place(again[0]) >= 0))
    for result in results:
        assert (result == (engine.size - 1) / 2).all()


@ON_TWO_AND_THREE
def test_ranks_may_use_different_positions(case: EngineCase) -> None:
    """The positions differ because ranks keep different results."""
    engine = new_engine(case)
    engine.transport.least_in_arena = 0
    kept = []
    for turn in range(12):
        result = engine.allreduce(np.full(3000, turn, np.float32))
        assert (result == turn * engine.size).all()
        if turn % (engine.rank + 2) == 0:
            kept.append((turn, result))
    places = [engine.transport._arena.place(result) for _, result in kept]
    assert len(set(places)) == len(places)
    assert len(set(everyone(engine.size, places[-1]))) > 1
    for turn, result in kept:
        assert (result == turn * engine.size).all()


@ON_TWO_AND_THREE
def test_a_forked_child_has_private_copies_of_results(case: EngineCase) -> None:
    engine = new_engine(case)
    engine.transport.least_in_arena = 0
    dropped = engine.allreduce(np.ones(9000, np.float32))
    kept = engine.allreduce(np.full(9000, 2, np.float32))
    place = engine.transport._arena.place(dropped)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        correct = False
        try:
            os.read(reader, 1)
            correct = bool((dropped == engine.size).all() and (kept == 2 * engine.size).all())
            kept[:] = 5
        finally:
            os._exit(7 if correct else 1)
    del dropped
    again = engine.allreduce(np.full(9000, 3, np.float32))
    assert engine.transport._arena.place(again) == place
    os.write(writer, b"1")
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (kept == 2 * engine.size).all()
    assert (again == 3 * engine.size).all()


@pytest.mark.ranks(2)
def test_drop_part_frees_the_buffers_of_a_lost_rank(rank_count: int) -> None:
    mpi = mpi_of_job()
    host = mpi.COMM_WORLD.Dup()
    arena = open_arena(mpi, host)
    assert arena is not None
    buffer = arena.empty(3 * PAGE)
    buffer[:] = 5
    host.Barrier()
    if host.Get_rank() == 0:
        arena.drop_part(1)
    host.Barrier()
    assert arena._file.held_bytes == 3 * PAGE
    host.Barrier()  # reading a page allocates it again
    assert (buffer == 5 * (host.Get_rank() == 0)).all()
