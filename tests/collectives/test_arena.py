"""Results in memory that all ranks of a host see: where they lie, and what if there is no room."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.collectives import shared_file
from hvdtrain.collectives.arena import Arena, open_arena
from hvdtrain.collectives.fusion import BufferPool
from hvdtrain.collectives.shared_file import SharedFile, free_bytes, share_file, share_on_host
from hvdtrain.collectives.shared_memory import LEAST_IN_ARENA
from tests.collectives.engines import EngineCase, everyone, mpi_of_job, new_engine, on_engines
from tests.harness.required import do_without

PAGE = mmap.PAGESIZE
PART_BYTES = 64 * PAGE
MCL_FUTURE = 2  # of mlockall
ON_TWO_AND_THREE = on_engines(
    [EngineCase(kind="shared_memory", hosts=(0,) * ranks) for ranks in (2, 3)]
)


@pytest.fixture
def file() -> SharedFile:
    """A sparse file of two parts, which nobody else has."""
    mine = share_file([PART_BYTES] * 2, 0, lambda path: path, lambda opened: opened, sparse=True)
    assert mine is not None
    return mine


@pytest.fixture
def arena(file: SharedFile) -> Arena:
    """The part of the second rank."""
    return Arena(file, 1, PART_BYTES)


def test_buffers_lie_apart(arena: Arena) -> None:
    buffers = [arena.empty(nbytes) for nbytes in (1, PAGE, PAGE + 1, 5)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number + 1
    for number, buffer in enumerate(buffers):
        assert (buffer == number + 1).all()
    assert [arena.place(buffer) for buffer in buffers] == [0, PAGE, 2 * PAGE, 4 * PAGE]


def test_others_find_them(file: SharedFile, arena: Arena) -> None:
    other = Arena(file, 0, PART_BYTES)
    arena.empty(PAGE)
    mine = arena.empty(100)
    theirs = other.at(1, arena.place(mine), 100)
    theirs[:] = 7
    assert (mine == 7).all()
    assert arena.place(mine[3:]) == arena.place(mine) + 3
    assert other.place(mine) == -1
    assert arena.place(np.empty(3)) == -1


def test_place_and_memory_come_back(file: SharedFile, arena: Arena) -> None:
    first, second, third = (arena.empty(8 * PAGE) for _ in range(3))
    first[:], second[:], third[:] = 1, 2, 3
    held = file.held_bytes
    place = arena.place(second)
    arena.drop(second)
    assert file.held_bytes == held - 8 * PAGE
    assert (first == 1).all()
    assert (third == 3).all()
    assert arena.place(arena.empty(9 * PAGE)) > arena.place(third), "it would not fit between"
    assert arena.place(arena.empty(8 * PAGE)) == place


def test_pool_gives_dropped_memory_back(file: SharedFile, arena: Arena) -> None:
    pool = BufferPool(2, arena.empty, arena.drop)
    for pages in (1, 3, 8, 20, 24):
        buffer = pool.take(pages * PAGE)
        assert arena.place(buffer) >= 0
        buffer[:] = pages
        del buffer
    assert file.held_bytes == (20 + 1 + 24 + 1) * PAGE, "more than two were kept"


@pytest.mark.parametrize("free", [None, 2 * PAGE - 1])
def test_where_little_is_free(
    file: SharedFile, arena: Arena, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "free_bytes", lambda: free)
    with pytest.raises(MemoryError, match="no room for"):
        arena.empty(2 * PAGE)
    assert file.held_bytes == 0
    monkeypatch.undo()
    assert arena.place(arena.empty(2 * PAGE)) == 0


def test_without_room(arena: Arena) -> None:
    held = arena.empty(PART_BYTES - PAGE)
    with pytest.raises(MemoryError):
        arena.empty(2 * PAGE)
    arena.drop(held)
    assert arena.place(arena.empty(2 * PAGE)) == 0


def test_full_file_system(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take space between the look and the claim; what was claimed in vain is free again."""
    monkeypatch.setattr(shared_file, "SHARED_MEMORY", str(small_disk))
    monkeypatch.setattr(shared_file, "CLAIM_BYTES", 4 * PAGE)
    room = free_bytes()
    assert room
    file = share_file([2 * room], 0, lambda path: path, lambda opened: opened, sparse=True)
    assert file is not None
    assert list(small_disk.iterdir()) == []
    monkeypatch.setattr(shared_file, "free_bytes", lambda: 2 * room)
    assert not file.claim(0, room + PAGE)
    assert file.held_bytes == 0
    assert file.claim(0, room // 2)
    assert file.held_bytes == room // 2


@pytest.mark.ranks(2)
def test_neither_dumped_nor_forked(rank_count: int) -> None:
    """A dump would fill shared memory; a child would see what its parent writes later."""
    mpi = mpi_of_job()
    arena = open_arena(mpi, mpi.COMM_WORLD.Dup())
    assert arena is not None
    address = arena.at(0, 0, 1).ctypes.data
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (head,) = (n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    flags = next(line for line in lines[head:] if line.startswith("VmFlags:"))
    assert {"dd", "dc"} <= set(flags.split())


@pytest.mark.ranks(2)
def test_where_the_program_locks_its_memory(rank_count: int) -> None:
    """Then all of a sparse file would get its space at once: no arena."""
    libc = ctypes.CDLL(None)
    if libc.mlockall(MCL_FUTURE) != 0:
        do_without("memlock", "this process may not lock its memory")
    try:
        mpi = mpi_of_job()
        file = share_on_host(mpi, mpi.COMM_WORLD.Dup(), [50 * PAGE] * 2, sparse=True)
    finally:
        libc.munlockall()
    assert file is None


@pytest.fixture
def limited_addresses() -> Iterator[None]:
    """As under ``ulimit -v``, on rank 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if mpi_of_job().COMM_WORLD.Get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 46, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.ranks(2)
def test_where_addresses_are_limited(rank_count: int, limited_addresses: None) -> None:
    mpi = mpi_of_job()
    assert open_arena(mpi, mpi.COMM_WORLD.Dup()) is None


@ON_TWO_AND_THREE
def test_large_results_lie_in_it(case: EngineCase) -> None:
    engine = new_engine(case)
    items = LEAST_IN_ARENA // 4
    for count, inside in ((items, True), (items - 16, False)):
        result = engine.allreduce(np.full(count, engine.rank + 1, np.float32))
        assert (result == sum(range(1, engine.size + 1))).all()
        assert (engine.transport._arena.place(result) >= 0) is inside


@ON_TWO_AND_THREE
def test_one_rank_without_room(case: EngineCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others don't write to it, nor it to them; and later they do."""
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
    assert (
        everyone(engine.size, engine.transport._arena.place(again[0]) >= 0) == [True] * engine.size
    )
    for result in results:
        assert (result == (engine.size - 1) / 2).all()


@ON_TWO_AND_THREE
def test_ranks_may_take_different_places(case: EngineCase) -> None:
    """As where one keeps results that the others drop."""
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
def test_results_in_a_forked_child(case: EngineCase) -> None:
    """They are what its parent held when it was forked, and its own, whatever happens later."""
    engine = new_engine(case)
    engine.transport.least_in_arena = 0
    dropped = engine.allreduce(np.ones(9000, np.float32))
    kept = engine.allreduce(np.full(9000, 2, np.float32))
    place = engine.transport._arena.place(dropped)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        right = False
        try:
            os.read(reader, 1)
            right = bool((dropped == engine.size).all() and (kept == 2 * engine.size).all())
            kept[:] = 5
        finally:
            os._exit(7 if right else 1)
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
def test_parts_of_the_dead(rank_count: int) -> None:
    """Others give back what a rank had that died; theirs stays."""
    mpi = mpi_of_job()
    host = mpi.COMM_WORLD.Dup()
    arena = open_arena(mpi, host)
    assert arena is not None
    mine = arena.empty(3 * PAGE)
    mine[:] = 5
    host.Barrier()
    if host.Get_rank() == 0:
        arena.drop_part(1)
    host.Barrier()
    assert arena._file.held_bytes == 3 * PAGE
    host.Barrier()  # a page that is read has its space again
    assert (mine == 5 * (host.Get_rank() == 0)).all()
