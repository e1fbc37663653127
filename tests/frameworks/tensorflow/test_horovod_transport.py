"""A real Horovod as the engine, with both of its controllers."""

from __future__ import annotations

import os
import re

import pytest

from tests.harness.jobs import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]


@pytest.fixture
def horovodrun(environment, run_command, tmp_path):
    """Run a script on two ranks that communicate through Horovod."""
    python = environment("horovod-keras3")

    def run(controller, script, *arguments):
        path = tmp_path / "script.py"
        path.write_text(script)
        backend = {} if controller == "--gloo" else {"HVDTRAIN_BACKEND": "horovod"}
        folders = os.pathsep.join([str(python.parent), os.defpath])
        return run_command(
            [
                *(python.parent / "horovodrun", controller, "-np", "2"),
                *("-H", "localhost:2", python, path, *arguments),
            ],
            env={
                "PATH": folders,
                "PYTHONPATH": str(REPOSITORY),
                "HVDTRAIN_TIMEOUT_S": "290",
                **backend,
            },
            timeout_s=300,
        )

    return run


# One program, because ranks of Horovod can't be forked and take seconds to start.
PROGRAM = """
import runpy, sys, time
import numpy as np
import hvdtrain
from hvdtrain import world
from hvdtrain.errors import ConfigurationError, MismatchError, NonFiniteError
from tests.collectives.engines import DTYPES, expected, values

hvdtrain.init()
engine = world.collectives()
rank, size = engine.rank, engine.size
assert engine.kind == "horovod"
assert (hvdtrain.rank(), hvdtrain.size(), hvdtrain.local_size()) == (rank, size, size)
SHAPES = [(), (0,), (7,), (2, 3, 5), (3000,)]
done = 0
for op in ("sum", "average", "min", "max", "product"):
    for dtype in DTYPES:
        if dtype.kind == "b" and op == "sum" or dtype.kind in "iub" and op == "average":
            continue
        arrays = [values(rank, shape, dtype) for shape in SHAPES]
        results = engine.grouped_allreduce(arrays, op, name=f"{op} {dtype}")
        for shape, result in zip(SHAPES, results):
            assert result.dtype == dtype and result.shape == shape
            np.testing.assert_array_equal(result, expected(op, size, shape, values, dtype))
        done += 1
        share = engine.reduce_scatter(arrays[-1], op, name="scatter")
        start = sum(len(part) for part in np.array_split(np.arange(3000), size)[:rank])
        np.testing.assert_array_equal(
            share, expected(op, size, (3000,), values, dtype)[start : start + len(share)]
        )
for dtype in DTYPES:
    rows = values(rank, (rank + 1, 2), dtype)
    gathered = engine.allgather(rows, name="rows")
    np.testing.assert_array_equal(
        gathered, np.concatenate([values(r, (r + 1, 2), dtype) for r in range(size)])
    )
    received = engine.broadcast(values(rank, (4, 3), dtype), size - 1, name="values")
    np.testing.assert_array_equal(received, values(size - 1, (4, 3), dtype))
rows, counts = engine.alltoall(np.arange(size + 1) + 10 * rank, [1] * (size - 1) + [2])
assert counts == [1 + (rank == size - 1)] * size
assert rows[0] == rank
assert engine.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
assert engine.broadcast_object(rank, size - 1) == size - 1
bad = np.array([1.0, np.nan if rank else 2.0], "float32")
for _ in range(2):
    try:
        engine.grouped_allreduce([bad], name="bad", require_finite=True)
        raise SystemExit("no error")
    except NonFiniteError:
        pass
for unsupported in (engine.messages, lambda: engine.subset([0])):
    try:
        unsupported()
        raise SystemExit("no error")
    except ConfigurationError as error:
        assert "need MPI" in str(error)
if rank:
    engine.allreduce(np.ones(3), name="one more")
assert engine.join() == size - 1
try:
    engine.allreduce(np.ones(3 + rank), name="x")
    raise SystemExit("no mismatch")
except MismatchError as error:
    assert "rank 0: allreduce(x) with sum, float64, ((3,),)" in str(error), error
# One write, because horovodrun disables buffering and mpirun tags each write.
print(f"done {done}\\n", end="", flush=True)

way, *trainings = sys.argv[1:]
for training in trainings:
    sys.argv = [training, "uneven"]
    runpy.run_path(training, run_name="__main__")

assert engine.transport._watchdog._limit_s == 300.0  # the job's time-out and a margin
engine.transport._watchdog._limit_s = 3.0
engine.barrier()
if rank == 1:
    if way == "fails":
        raise ValueError("bad batch")
    time.sleep(60)
engine.allreduce(np.ones(3), name="gradients")
"""


@pytest.mark.parametrize(
    ("controller", "way", "trainings"),
    [
        ("--gloo", "hangs", [REPOSITORY / "tests" / "trainer" / "train_all_cases.py"]),
        ("--mpi", "fails", []),
    ],
)
def test_a_job_meets_the_contract_trains_and_ends_without_a_rank(
    horovodrun, controller, way, trainings
):
    done = horovodrun(controller, PROGRAM, way, *trainings)
    assert len(re.findall(r"done 55\b", done.stdout)) == 2, done
    why = "horovodrun --gloo started" if controller == "--gloo" else "--backend horovod"
    assert f"an installed Horovod combines gradients: {why}" in done.stderr, done
    # This also compares the weights with those of one process.
    assert len(re.findall(r"trained 1\b", done.stdout)) == 2 * len(trainings), done

    assert done.returncode != 0
    # Open MPI 4 tags each write, even within a line.
    output = re.sub(r"\[1,\d\]<std(out|err)>:", "", done.stderr + done.stdout)
    if way == "fails":
        assert "ValueError: bad batch" in output
    else:
        assert "3 s inside Horovod in allreduce(gradients)" in output
