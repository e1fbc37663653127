"""Programs in elastic jobs after the loss of ranks: results, errors and exit codes."""

from __future__ import annotations

import json
import platform
import re
import sys
import textwrap
from collections.abc import Callable

import pytest

from tests.collectives.test_exit_hooks import LIMIT_S, START, _errors
from tests.harness.jobs import Completed

Run = Callable[..., Completed]


EACH_ENGINE = pytest.mark.parametrize("elastic", ["mpi", "shared_memory"], indirect=True)


@pytest.fixture
def elastic(request: pytest.FixtureRequest, run_command, mpirun, tmp_path) -> Run:
    """Run a script on the ranks of an elastic job, and print ``show`` on each of them."""
    engine = getattr(request, "param", "shared_memory")

    def run(np: int, body: str, *, show: str = "", env: dict[str, str] | None = None) -> Completed:
        shown = f"\nimport json; print('=' + json.dumps({show}), flush=True)" if show else ""
        path = tmp_path / "script.py"
        path.write_text(START + textwrap.dedent(body) + shown)
        argv = mpirun(np, [sys.executable, str(path)])
        variables = {"HVDTRAIN_ELASTIC": "1", "HVDTRAIN_COLLECTIVES": engine, **(env or {})}
        return run_command([argv[0], "--with-ft", "ulfm", *argv[1:]], env=variables)

    return run


def _printed(done: Completed) -> list[object]:
    lines = done.stdout.splitlines()
    return [json.loads(line[1:]) for line in sorted(lines) if line.startswith("=")]


@EACH_ENGINE
@pytest.mark.parametrize("way", ["os.kill(os.getpid(), 11)", "os.kill(os.getpid(), 9)"])
def test_the_job_succeeds_after_a_loss(elastic: Run, way: str) -> None:
    body = f"""
        engine.barrier()
        if rank == 1:
            {way}
        total = engine.allreduce(np.ones(3), name="gradients")
    """
    done = elastic(3, body, show="[rank, engine.rank, engine.size, total.tolist()]")
    assert _printed(done) == [[0, 0, 2, [2.0] * 3], [2, 1, 2, [2.0] * 3]], done
    assert done.returncode == 0, done
    assert done.seconds < LIMIT_S
    assert _errors(done) == {}


def test_no_output_without_a_loss(elastic: Run) -> None:
    done = elastic(2, "engine.allreduce(np.ones(3))\nengine.barrier()")
    assert done.returncode == 0, done
    assert done.stderr == "" or platform.machine() != "x86_64", "warnings of MPI"


def test_exit_codes_after_a_loss(elastic: Run) -> None:
    body = """
        engine.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        engine.barrier()
        sys.exit(3 * (rank == 2))
    """
    done = elastic(3, body)
    assert done.returncode == 3, done
    assert done.seconds < LIMIT_S


def test_a_rank_that_has_exited_takes_part_in_recovery(elastic: Run) -> None:
    """The chief waits at its exit when another rank dies."""
    body = """
        engine.barrier()
        if rank > 0:
            time.sleep(0.5)
        if rank == 2:
            os.kill(os.getpid(), 9)
        if rank > 0:
            time.sleep(1.0)
    """
    done = elastic(4, body, show="rank")
    assert _printed(done) == [0, 1, 3], done
    assert done.returncode == 0, done


@EACH_ENGINE
def test_loss_in_the_last_operation(elastic: Run) -> None:
    body = """
        engine.barrier()
        confirm = engine.transport.confirm
        if rank == 1:
            engine.transport.confirm = lambda call: os.kill(os.getpid(), 9)
        total = engine.allreduce(np.full(2, 1 << rank))
    """
    done = elastic(3, body, show="total.tolist()")
    totals = _printed(done)
    assert len(totals) == 2, done
    assert totals[0] == totals[1]
    assert totals[0] in ([7, 7], [5, 5])
    assert done.returncode == 0, done


LATE = """
    import threading
    engine.barrier()
    original = engine.transport.{method}
    def late(*arguments):
        engine.transport.{method} = original
        original(*arguments)
        while True:
            engine.transport.detector.check("the test")  # raises once rank 1 is lost
            time.sleep(0.01)
    if rank == 1:
        threading.Timer(0.5, os.kill, [os.getpid(), 9]).start()
    if rank == 2:
        engine.transport.{method} = late
    first = engine.allreduce(np.full(2, 1 << rank), name="first")
    if rank == 1:
        time.sleep(60)
    second = engine.allreduce(np.full(2, 1 << rank), name="second")
"""


@EACH_ENGINE
def test_loss_noticed_after_another_rank_has_returned(elastic: Run) -> None:
    """Rank 2 has its result, and rank 0 is in the next operation."""
    done = elastic(3, LATE.format(method="confirm"), show="[first.tolist(), second.tolist()]")
    assert _printed(done) == [[[7, 7], [5, 5]]] * 2, done


@EACH_ENGINE
def test_loss_noticed_before_all_have_a_result(elastic: Run) -> None:
    """Rank 2 lacks a result, so the operation is repeated without rank 1."""
    done = elastic(3, LATE.format(method="allreduce"), show="[first.tolist(), second.tolist()]")
    assert _printed(done) == [[[5, 5], [5, 5]]] * 2, done


@EACH_ENGINE
def test_an_exception_ends_all_ranks(elastic: Run) -> None:
    body = """
        engine.barrier()
        if rank == 1:
            raise ValueError("mistake")
        engine.allreduce(np.ones(3), name="gradients")
        print("not reached")
    """
    done = elastic(3, body)
    assert done.returncode == 1, done
    assert done.seconds < LIMIT_S
    assert "not reached" not in done.stdout
    errors = _errors(done)
    assert errors[1] == "failed: ValueError: mistake"
    for rank in (0, 2):
        assert errors[rank].startswith("stops: rank 1 failed: ValueError: mistake (")


@EACH_ENGINE
def test_loss_after_a_mismatch(elastic: Run) -> None:
    body = """
        from hvdtrain.errors import MismatchError
        for rows in (3, 30_000):
            try:
                engine.allreduce(np.ones(rows + (rank == 1)), name="gradients")
            except MismatchError:
                engine.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        total = engine.allreduce(np.ones(2), name="gradients")
    """
    done = elastic(3, body, show="total.tolist()")
    assert _printed(done) == [[2.0, 2.0]] * 2, done


def test_exception_while_others_are_busy(elastic: Run) -> None:
    """If a rank exited before the other ranks know of the exception, it would count as lost."""
    body = """
        engine.barrier()
        if rank == 1:
            raise ValueError("mistake")
        time.sleep(7)
        engine.barrier()
        print("not reached")
    """
    done = elastic(2, body)
    assert done.returncode == 1, done
    assert "not reached" not in done.stdout
    assert _errors(done)[0].startswith("stops: rank 1 failed: ValueError: mistake (")


def test_exception_during_recovery(elastic: Run) -> None:
    body = """
        engine.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        if rank == 2:
            time.sleep(1)
            raise ValueError("mistake")
        engine.barrier(name="epoch")
        print("not reached")
    """
    done = elastic(3, body)
    assert done.returncode == 1, done
    assert done.seconds < LIMIT_S
    assert _errors(done)[0].startswith("stops: rank 2 failed: ValueError: mistake (")


def test_operations_work_with_too_few_ranks(elastic: Run) -> None:
    """The program may save a last checkpoint before it raises the error."""
    body = """
        engine.barrier()
        if rank in (0, 3):
            os.kill(os.getpid(), 9)
        step = engine.allreduce(np.ones(1))
        assert engine.too_few is not None
        saved = engine.allgather(np.array([rank]))
        print("=" + str(saved.tolist()), flush=True)
        raise engine.too_few
    """
    done = elastic(4, body, env={"HVDTRAIN_MIN_NP": "3"})
    assert _printed(done) == [[1, 2], [1, 2]], done
    assert done.returncode == 1
    for text in _errors(done).values():
        assert text.startswith(
            "stops: 2 of 4 ranks are left, rank 0, 3 died, and training needs at least 3 "
            "(HVDTRAIN_MIN_NP, hvdtrain run --min-np)."
        )


@EACH_ENGINE
def test_the_root_of_a_broadcast_dies(elastic: Run) -> None:
    """All ranks get the same error, and may continue."""
    body = """
        from hvdtrain.errors import RanksLostError
        engine.barrier()
        if rank == 0:
            os.kill(os.getpid(), 9)
        if rank == 1:
            time.sleep(0.7)
        received = []
        try:
            engine.broadcast_object("from the chief" if engine.rank == 0 else None, name="state")
        except RanksLostError as error:
            received.append(str(error))
        received.append(engine.broadcast_object(f"of {rank}", replicated=True))
        received.append(engine.broadcast(np.full(2, rank), root=1).tolist())
    """
    done = elastic(3, body, show="received")
    first, second = _printed(done)
    assert first == second
    assert first[0].startswith("The root of broadcast_object(state) with 0, json died")
    assert first[1:] == ["of 1", [2, 2]]
    assert done.returncode == 0


def test_without_ulfm_a_lost_rank_ends_the_job(launch) -> None:
    """The chief logs at the start that the job can't continue after a loss."""
    body = """
        engine.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        engine.barrier()
    """
    done = launch(2, START + textwrap.dedent(body), env={"HVDTRAIN_ELASTIC": "1"})
    assert done.returncode == 128 + 9
    lines = re.findall("^hvdtrain: HVDTRAIN_ELASTIC.*$", done.stderr, re.M)
    assert lines == [
        "hvdtrain: HVDTRAIN_ELASTIC=1 has no effect, so a rank that dies ends the job: start "
        "the job with `hvdtrain run --elastic`, or with `mpirun --with-ft ulfm`"
    ]
