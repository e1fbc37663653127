"""The memory that a host's ranks share: how much they take, and that all of them see it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdtrain.collectives import shared_file
from hvdtrain.collectives.host_window import Window, ring_slots
from tests.collectives.engines import everyone, mpi_of_job

MIB = 1 << 20


@pytest.mark.parametrize(
    ("local_size", "chunk_bytes", "free_bytes", "away", "expected"),
    [
        pytest.param(2, 2 * MIB, None, 0, 10, id="fills-the-ring"),
        pytest.param(4, 2 * MIB, 1 << 40, 0, 6, id="shared-by-more-ranks"),
        pytest.param(64, 2 * MIB, 1 << 40, 0, 4, id="never-below-four"),
        pytest.param(2, 64, 1 << 40, 0, 349525, id="small-chunks"),
        pytest.param(2, 2 * MIB, 120 * MIB, 0, 10, id="half-of-what-is-free"),
        pytest.param(2, 2 * MIB, 64 * MIB, 0, 4, id="small-container"),
        pytest.param(8, 2 * MIB, 1 << 40, 8, 12, id="and-between-hosts"),
        pytest.param(8, 2 * MIB, 300 * MIB, 8, 4, id="no-room-for-those"),
        pytest.param(2, 2 * MIB, 1 << 40, 2, 10, id="those-have-room-in-the-ring"),
    ],
)
def test_slots(
    local_size: int, chunk_bytes: int, free_bytes: int | None, away: int, expected: int
) -> None:
    assert ring_slots(local_size, chunk_bytes, free_bytes, away) == expected


# How each rank finds the folder for shared files, None if it is not there.
FOLDERS = {"on-all": ("/dev/shm", "/dev/shm"), "on-none": (None, None)}


@pytest.mark.parametrize("survives", [False, True])
@pytest.mark.parametrize("folders", FOLDERS.values(), ids=FOLDERS)
@pytest.mark.ranks(2)
def test_all_see_what_one_writes(
    survives: bool, folders: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mpi = mpi_of_job()
    host = mpi.COMM_WORLD.Dup()
    rank = host.Get_rank()
    monkeypatch.setattr(shared_file, "SHARED_MEMORY", folders[rank] or str(tmp_path / "missing"))
    shared = Window(mpi, host, 4096, survives=survives)
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
    everyone(2, "have looked")
    shared.clear_words(rank)
    assert shared.words[rank][3] == 0
    assert (shared.slot(rank, 0, kind) == 1000 * rank).all()


@pytest.mark.ranks(2)
def test_file_that_one_rank_can_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share no files: then none of the ranks maps it."""
    mpi = mpi_of_job()
    host = mpi.COMM_WORLD.Dup()
    original = shared_file._open_file
    if host.Get_rank() == 1:
        monkeypatch.setattr(
            shared_file, "_open_file", lambda path, nbytes: original("/no/such", nbytes)
        )
    shared = Window(mpi, host, 4096, survives=True)
    assert shared._window is not None
    shared.words[host.Get_rank()][0] = 5
    shared.sync()
    host.Barrier()
    assert [words[0] for words in shared.words] == [5, 5]
