"""Engines for a subset of the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.errors import ConfigurationError
from tests.collectives.engines import CASES, EVERY_ENGINE, new_engine

SETS = {1: [[0]], 2: [[1], [0, 1]], 3: [[0, 2], [1], [2, 1]], 4: [[1, 3], [0, 2, 3], [2]]}
SHARED = [case for case in CASES if case.kind == "shared_memory" and len(case.hosts) == 3]


@EVERY_ENGINE
def test_every_operation_of_a_subset(subject):
    """Operations of the subset alternate with operations of all ranks."""
    engine = subject.engine
    rank, size = engine.rank, engine.size
    for ranks in SETS[size]:
        part = engine.subset(ranks)
        assert (part is not None) == (rank in ranks)
        assert int(engine.allreduce(np.array(1))) == size
        if part is None:
            continue
        inside = sorted(ranks)
        assert (part.rank, part.size) == (inside.index(rank), len(inside))
        large = np.arange(5000) + rank
        before = engine.reduced_bytes
        np.testing.assert_array_equal(
            part.allreduce(large), len(inside) * np.arange(5000) + sum(inside)
        )
        assert (part.reduced_bytes, engine.reduced_bytes) == (large.nbytes, before + large.nbytes)
        np.testing.assert_array_equal(part.allgather(np.array([rank])), inside)
        assert part.reduced_bytes == large.nbytes, "allgather reduces nothing"
        np.testing.assert_array_equal(part.broadcast(np.array(rank), part.size - 1), inside[-1])
        rows = np.full((2 * part.size, 3), float(rank))
        np.testing.assert_array_equal(part.reduce_scatter(rows), np.full((2, 3), sum(inside)))
        received, counts = part.alltoall(np.full(part.size, rank))
        np.testing.assert_array_equal(received, inside)
        assert counts == [1] * part.size
        assert part.allgather_object({"rank": rank}) == [{"rank": n} for n in inside]
        part.barrier()


@EVERY_ENGINE
@pytest.mark.parametrize("ranks", [[], [0, 0], [-1], [9]], ids=str)
def test_invalid_ranks(subject, ranks):
    with pytest.raises(ConfigurationError, match=r"ranks must be .*, got \["):
        subject.engine.subset(ranks)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_a_subset_of_a_subset(case):
    engine = new_engine(case)
    outer = engine.subset([1, 2])
    if outer is not None:
        inner = outer.subset([1])
        assert (inner is not None) == (engine.rank == 2)
        if inner is not None:
            assert inner.numbers == (2,)
            assert inner.allgather_object(engine.rank) == [2]


HEAD = """
import os, sys, time
import numpy as np
import hvdtrain
from hvdtrain import world

hvdtrain.init()
rank = hvdtrain.rank()
part = world.collectives().subset([1, 2])
"""
FAILURES = {
    # The action of rank 2 while rank 1 waits for it, and the error of rank 1.
    "failed": ("raise ValueError('bad batch')", "rank 2 failed: ValueError: bad batch"),
    "left": ("sys.exit(0)", "rank 2 ended its program while rank 1 waits for it in allreduce"),
    "other call": ("part.barrier()", "Ranks made different calls at the same point. rank 1: "),
    "elsewhere": ("world.collectives().barrier(name='all')", "rank 2 waits in barrier(all)"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", FAILURES)
def test_errors_use_ranks_of_the_job(launch, tmp_path, case):
    action, error = FAILURES[case]
    script = tmp_path / "program.py"
    script.write_text(
        HEAD
        + f"""
if rank == 0:
    world.collectives().barrier(name="all")
elif rank == 1:
    part.allreduce(np.array(1), name="set")
else:
    time.sleep(0.5)
    {action}
"""
    )
    env = {"HVDTRAIN_TIMEOUT_S": "4" if case == "elsewhere" else "60"}
    done = launch(3, script, timeout_s=60, env=env)
    assert done.returncode == 1, done
    assert error in done.stderr
