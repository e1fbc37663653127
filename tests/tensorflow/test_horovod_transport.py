"""A real Horovod as the engine, under both of its controllers."""

from __future__ import annotations

import os
import re

import pytest

from tests.harness.jobs import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]


@pytest.fixture
def horovodrun(environment, run_command, tmp_path):
    """Run a script, given as its text or as a path, on ranks that have Horovod as the engine."""
    python = environment("horovod-keras3")

    def run(controller, script, *arguments, env=None):
        path = script
        if isinstance(script, str):
            path = tmp_path / "script.py"
            path.write_text(script)
        asked = {} if controller == "--gloo" else {"HVDTRAIN_BACKEND": "horovod"}
        folders = os.pathsep.join([str(python.parent), os.defpath])
        return run_command(
            [
                *(python.parent / "horovodrun", controller, "-np", "2"),
                *("-H", "localhost:2", python, path, *arguments),
            ],
            env={"PATH": folders, "PYTHONPATH": str(REPOSITORY), **asked, **(env or {})},
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
        found = engine.grouped_allreduce(arrays, op, name=f"{op} {dtype}")
        for shape, result in zip(SHAPES, found):
            wanted = expected(op, size, shape, values, dtype)
            assert result.dtype == dtype and result.shape == shape
            np.testing.assert_array_equal(result, wanted)
        done += 1
        kept = engine.reduce_scatter(arrays[-1], op, name="scatter")
        start = sum(len(part) for part in np.array_split(np.arange(3000), size)[:rank])
        np.testing.assert_array_equal(
            kept, expected(op, size, (3000,), values, dtype)[start : start + len(kept)]
        )
for dtype in DTYPES:
    rows = values(rank, (rank + 1, 2), dtype)
    found = engine.allgather(rows, name="rows")
    np.testing.assert_array_equal(
        found, np.concatenate([values(r, (r + 1, 2), dtype) for r in range(size)])
    )
    given = engine.broadcast(values(rank, (4, 3), dtype), size - 1, name="given")
    np.testing.assert_array_equal(given, values(size - 1, (4, 3), dtype))
came, counts = engine.alltoall(np.arange(size + 1) + 10 * rank, [1] * (size - 1) + [2])
assert counts == [1 + (rank == size - 1)] * size
assert came[0] == rank
assert engine.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
assert engine.broadcast_object(rank, size - 1) == size - 1
bad = np.array([1.0, np.nan if rank else 2.0], "float32")
for _ in range(2):
    try:
        engine.grouped_allreduce([bad], name="bad", require_finite=True)
        raise SystemExit("no error")
    except NonFiniteError:
        pass
for refused in (engine.messages, lambda: engine.subset([0])):
    try:
        refused()
        raise SystemExit("not refused")
    except ConfigurationError as error:
        assert "need MPI" in str(error)
if rank:
    engine.allreduce(np.ones(3), name="one more")
assert engine.join() == size - 1
try:
    engine.allreduce(np.ones(3 + rank), name="x")
    raise SystemExit("no mismatch")
except MismatchError as error:
    assert "rank 0: allreduce(x) of sum, float64, ((3,),)" in str(error), error
# Unbuffered, as horovodrun has it, several words are several writes, which mpirun tags.
print(f"done {done}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_it_does_what_every_engine_does(horovodrun, controller):
    done = horovodrun(controller, CONTRACT)
    assert done.returncode == 0, done
    assert len(re.findall(r"done 55\b", done.stdout)) == 2, done
    why = "horovodrun --gloo started" if controller == "--gloo" else "--backend horovod"
    assert f"an installed Horovod combines gradients: {why}" in done.stderr, done


ALONE = """
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
def test_nobody_waits_for_ever(horovodrun, controller, way):
    """For a rank that failed, or does not come."""
    done = horovodrun(controller, ALONE, way, env={"HVDTRAIN_TIMEOUT_S": "4"})
    assert done.returncode != 0
    # Mostly the start of TensorFlow, several times as long on a busy machine.
    assert done.seconds < 150
    # Open MPI 4 puts its tag before each piece of a line that Python writes in pieces.
    said = re.sub(r"\[1,\d\]<std(out|err)>:", "", done.stderr + done.stdout)
    if way == "fails":
        assert "ValueError: bad batch" in said
    else:
        assert "s inside Horovod in allreduce(gradients)" in said


def test_training_equals_one_process(horovodrun):
    """As on every engine, to 1e-5."""
    program = REPOSITORY / "tests" / "keras" / "train_all_cases.py"
    done = horovodrun("--gloo", program, "uneven")
    assert done.returncode == 0, done
    assert len(re.findall(r"trained 1\b", done.stdout)) == 2
