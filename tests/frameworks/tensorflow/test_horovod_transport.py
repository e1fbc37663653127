"""A real Horovod as the engine, with both of its controllers."""

from __future__ import annotations

import os
import re

import pytest

from tests.harness.jobs import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]


@pytest.fixture
def horovodrun(environment, run_command, tmp_path):
    """Run a script, given as text or path, on two ranks that communicate through Horovod."""
    python = environment("horovod-keras3")

    def run(controller, script, *arguments, env=None):
        path = script
        if isinstance(script, str):
            path = tmp_path / "script.py"
            path.write_text(script)
        backend = {} if controller == "--gloo" else {"HVDTRAIN_BACKEND": "horovod"}
        folders = os.pathsep.join([str(python.parent), os.defpath])
        return run_command(
            [
                *(python.parent / "horovodrun", controller, "-np", "2"),
                *("-H", "localhost:2", python, path, *arguments),
            ],
            env={"PATH": folders, "PYTHONPATH": str(REPOSITORY), **backend, **(env or {})},
            timeout_s=300,
        )

    return run


CONTRACT = """
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
"""


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_the_contract_of_engines(horovodrun, controller):
    done = horovodrun(controller, CONTRACT)
    assert done.returncode == 0, done
    assert len(re.findall(r"done 55\b", done.stdout)) == 2, done
    why = "horovodrun --gloo started" if controller == "--gloo" else "--backend horovod"
    assert f"an installed Horovod combines gradients: {why}" in done.stderr, done


MISSING_RANK = """
import sys, time
import numpy as np
import hvdtrain
from hvdtrain import world

hvdtrain.init()
if hvdtrain.rank() == 1:
    if sys.argv[1] == "fails":
        raise ValueError("bad batch")
    time.sleep(60)
world.collectives().allreduce(np.ones(3), name="gradients")
"""


@pytest.mark.parametrize(("controller", "way"), [("--gloo", "hangs"), ("--mpi", "fails")])
def test_a_missing_or_failed_rank_ends_the_job(horovodrun, controller, way):
    done = horovodrun(controller, MISSING_RANK, way, env={"HVDTRAIN_TIMEOUT_S": "4"})
    assert done.returncode != 0
    # Most of it is the import of TensorFlow, which takes longer on a busy machine.
    assert done.seconds < 150
    # Open MPI 4 tags each write, even within a line.
    output = re.sub(r"\[1,\d\]<std(out|err)>:", "", done.stderr + done.stdout)
    if way == "fails":
        assert "ValueError: bad batch" in output
    else:
        assert "s inside Horovod in allreduce(gradients)" in output


def test_training_equals_one_process(horovodrun):
    program = REPOSITORY / "tests" / "trainer" / "train_all_cases.py"
    done = horovodrun("--gloo", program, "uneven")
    assert done.returncode == 0, done
    assert len(re.findall(r"trained 1\b", done.stdout)) == 2
