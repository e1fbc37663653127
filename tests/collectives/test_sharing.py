"""``Engine.share``, which allocates memory that the ranks of a host share."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives import shared_file
from hvdtrain.collectives.engine import single_engine
from tests.collectives.engines import EngineCase, shared_engine

HOSTS = {2: (0, 0), 3: (0, 1, 0)}


def _engine(rank_count: int):
    return shared_engine(EngineCase(kind="mpi", hosts=HOSTS[rank_count]))


@pytest.mark.ranks(2, 3)
def test_ranks_of_a_host_see_the_same_memory(rank_count: int) -> None:
    engine = _engine(rank_count)
    hosts = HOSTS[rank_count]
    memory = engine.share(1000 * engine.rank + 1)
    here = [rank for rank in range(rank_count) if hosts[rank] == hosts[engine.rank]]
    if engine.rank == 0 or len(here) > 1:
        assert sorted(memory) == here
    for rank, part in memory.items():
        assert part.dtype == np.uint8
        assert 1000 * rank < part.size <= 1000 * rank + 64
        assert part.ctypes.data % 64 == 0
        assert not part.any()
    engine.barrier()
    memory[engine.rank][:] = 7 + engine.rank
    engine.barrier()
    for rank, part in memory.items():
        assert (part == 7 + rank).all()


@pytest.mark.ranks(2)
def test_each_call_allocates_new_memory(rank_count: int) -> None:
    engine = _engine(rank_count)
    first, second = engine.share(100), engine.share(100)
    first[engine.rank][:] = 1
    engine.barrier()
    assert not any(part.any() for part in second.values())


@pytest.mark.ranks(2)
def test_nothing_is_shared_if_one_rank_cannot_open_the_file(
    rank_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(rank_count)
    if engine.rank == 1:
        monkeypatch.setattr(shared_file, "_open_file", lambda path, nbytes: None)
    assert engine.share(100) == {}


@pytest.mark.ranks(2)
def test_sharing_no_bytes(rank_count: int) -> None:
    assert _engine(rank_count).share(0) == {}


def test_a_single_process_shares_nothing() -> None:
    assert single_engine().share(100) == {}
