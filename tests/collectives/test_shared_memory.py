"""Allocation of the memory that the ranks of a host share."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.collectives import shared_file, shared_memory
from hvdtrain.collectives.host_memory import open_window, ring_slots
from hvdtrain.collectives.shared_file import SharedFile
from tests.collectives.engines import EngineCase, everyone, mpi_of_job, new_engine, on_engines

MIB = 1 << 20


@pytest.mark.parametrize(
    ("local_size", "chunk_bytes", "free_bytes", "away", "expected"),
    [
        pytest.param(2, 2 * MIB, None, 0, 10, id="fills-the-ring"),
        pytest.param(4, 2 * MIB, 1 << 40, 0, 6, id="more-ranks"),
        pytest.param(64, 2 * MIB, 1 << 40, 0, 4, id="minimum"),
        pytest.param(2, 64, 1 << 40, 0, 349525, id="small-chunks"),
        pytest.param(2, 2 * MIB, 120 * MIB, 0, 10, id="half-of-free-memory"),
        pytest.param(2, 2 * MIB, 64 * MIB, 0, 4, id="small-container"),
        pytest.param(8, 2 * MIB, 1 << 40, 8, 12, id="several-hosts"),
        pytest.param(8, 2 * MIB, 300 * MIB, 8, 4, id="several-hosts-small-container"),
        pytest.param(2, 2 * MIB, 1 << 40, 2, 10, id="several-hosts-fit-the-ring"),
    ],
)
def test_ring_slots(
    local_size: int, chunk_bytes: int, free_bytes: int | None, away: int, expected: int
) -> None:
    assert ring_slots(local_size, chunk_bytes, free_bytes, away) == expected


@pytest.mark.parametrize("files", [True, False], ids=["file", "mpi-window"])
@pytest.mark.ranks(2)
def test_all_ranks_see_writes_to_a_window(
    files: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mpi = mpi_of_job()
    host = mpi.COMM_WORLD.Dup()
    rank = host.Get_rank()
    if not files:
        monkeypatch.setattr(shared_file, "SHARED_MEMORY", str(tmp_path / "missing"))
    shared = open_window(mpi, host, 4096)
    assert shared is not None
    assert (shared._mpi_window is None) is files
    kind = np.dtype(np.int32)
    for number in range(shared.slots):
        shared.slot(rank, number, kind)[:] = 1000 * rank + number
        if rank == 1:
            shared.result(number, kind)[:] = 500 + number
    shared.words[rank][3] = 7 + rank
    shared.sync()
    host.Barrier()
    for number in range(shared.slots):
        for rank in (0, 1):
            assert (shared.slot(rank, number, kind) == 1000 * rank + number).all()
        assert (shared.result(number, kind) == 500 + number).all()
    assert [shared.words[rank][3] for rank in (0, 1)] == [7, 8]
    everyone(2, "done reading")
    shared.clear_words(rank)
    assert shared.words[rank][3] == 0
    assert (shared.slot(rank, 0, kind) == 1000 * rank).all()


@pytest.mark.ranks(2)
def test_no_window_if_one_rank_cannot_open_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens in containers that don't share files."""
    mpi = mpi_of_job()
    host = mpi.COMM_WORLD.Dup()
    original = shared_file._open_file
    if host.Get_rank() == 1:
        monkeypatch.setattr(
            shared_file, "_open_file", lambda path, nbytes: original("/no/such", nbytes)
        )
    assert open_window(mpi, host, 4096) is None


ON_ONE_AND_TWO_HOSTS = on_engines(
    [EngineCase(kind="shared_memory", hosts=hosts) for hosts in ((0, 0), (0, 0, 1))]
)


@ON_ONE_AND_TWO_HOSTS
def test_messages_are_used_without_shared_memory(case: EngineCase, monkeypatch, caplog) -> None:
    monkeypatch.setattr(logging.getLogger("hvdtrain"), "propagate", True)
    mpi = mpi_of_job()
    rank = mpi.COMM_WORLD.Get_rank()
    if rank == 1:
        monkeypatch.setattr(SharedFile, "claim", lambda file, start, nbytes: False)
    before = shared_mappings()
    engine = new_engine(case)
    assert engine.kind == "mpi"
    assert shared_mappings() == before
    total = engine.allreduce(np.full(3000, rank + 1, np.float32))
    assert (total == sum(range(1, engine.size + 1))).all()
    assert ("send messages instead" in caplog.text) is (rank == 0)


@ON_ONE_AND_TWO_HOSTS
def test_chunks_are_smaller_with_little_memory(case: EngineCase, monkeypatch, caplog) -> None:
    monkeypatch.setattr(logging.getLogger("hvdtrain"), "propagate", True)
    free = 2 * 4 * (256 << 10) * (case.hosts.count(0) + 1)
    if mpi_of_job().COMM_WORLD.Get_rank() == 0:
        monkeypatch.setattr(shared_memory, "free_bytes", lambda: free)
    engine = new_engine(dataclasses.replace(case, chunk_bytes=2 * MIB))
    assert engine.kind == "shared_memory"
    assert engine.transport.chunk_bytes == 256 << 10
    total = engine.allreduce(np.full(200_000, engine.rank + 1, np.float32))
    assert (total == sum(range(1, engine.size + 1))).all()
    assert ("use smaller chunks" in caplog.text) is (engine.rank == 0)


@ON_ONE_AND_TWO_HOSTS
def test_close_frees_shared_memory(case: EngineCase) -> None:
    before = shared_mappings()
    engine = new_engine(case)
    engine.allreduce(np.ones(500_000, np.float32))
    part = engine.subset([0, 1])
    if part is not None:
        part.allreduce(np.ones(500_000, np.float32))
    assert shared_mappings() > before or engine.rank == 2
    engine.close()
    assert shared_mappings() == before
    null = mpi_of_job().COMM_NULL
    assert engine.transport.comm == null
    assert part is None or part.transport.comm == part.transport.detector._comm == null


@pytest.mark.ranks(2)
def test_ranks_spin_only_if_each_has_a_core() -> None:
    mpi = mpi_of_job()
    rank = mpi.COMM_WORLD.Get_rank()
    allowed = os.sched_getaffinity(0)
    cores = sorted(set().union(*everyone(2, allowed)))
    if len(cores) < 2:
        pytest.skip("there is one core")
    case = EngineCase(kind="shared_memory", hosts=(0, 0))
    try:
        for bound, spins in ((cores[rank], True), (cores[0], False)):
            os.sched_setaffinity(0, {bound})
            assert (new_engine(case).transport._spin_wait._spin_s > 0) is spins
    finally:
        os.sched_setaffinity(0, allowed)


def shared_mappings() -> int:
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/hvdtrain-" in line for line in lines)
