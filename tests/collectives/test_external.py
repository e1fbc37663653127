"""Agreement on operations of other libraries, and checks for failures during these operations."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdtrain.collectives import failure_detector
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    HvdtrainError,
    MismatchError,
    PeerFailedError,
)
from tests.collectives.engines import EngineCase, everyone, new_engine, on_engines

several = on_engines(
    [EngineCase(kind="mpi", hosts=(0, 0)), EngineCase(kind="shared_memory", hosts=(0, 0, 1))]
)


def _check_until_it_fails(engine) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        engine.check_external()
        time.sleep(0.01)


@several
def test_external_and_own_operations_in_turn(case: EngineCase) -> None:
    engine = new_engine(case)
    operations = []
    engine.observers.append(operations.append)
    for step in range(3):
        engine.begin_external("copy", "weights", ("float32", (3,)))
        engine.check_external()
        before = engine.reduced_bytes
        engine.end_external(1000)
        assert engine.reduced_bytes - before == 1000
        engine.check_external()
        assert engine.allreduce(np.full(3, step)).tolist() == [step * engine.size] * 3
    assert [operation.title for operation in operations] == [
        "copy(weights)",
        "copy(weights)",
        "allreduce",
    ] * 3
    assert all(operation.start_s <= operation.stop_s for operation in operations)


def test_a_single_process() -> None:
    engine = new_engine(EngineCase(kind="single", hosts=(0,)))
    engine.begin_external("copy", "weights", ())
    engine.check_external()
    engine.transport.timeout_s = -1.0
    engine.pause_external()
    engine.check_external()
    engine.resume_external()
    with pytest.raises(CollectiveTimeoutError, match=r"in copy\(weights\)"):
        engine.check_external()
    engine.end_external()
    engine.end_external(1000)
    assert engine.reduced_bytes == 0, "no operation was started"


@several
def test_different_external_operations(case: EngineCase) -> None:
    engine = new_engine(case)
    last = engine.size - 1
    with pytest.raises(MismatchError) as error:
        engine.begin_external("copy", "weights", ("float32", 3 + (engine.rank == last)))
    assert f"rank {last}: copy(weights) with float32, 4" in str(error.value)
    engine.check_external()
    engine.begin_external("copy", "weights", ("float32", 3))
    engine.end_external()


@several
def test_an_unfinished_operation_is_an_error(case: EngineCase) -> None:
    engine = new_engine(case)
    engine.begin_external("copy", "weights", ())
    with pytest.raises(CollectiveError, match=r"started copy\(more\) after copy\(weig"):
        engine.begin_external("copy", "more", ())
    with pytest.raises(CollectiveError):
        engine.barrier()


@several
def test_failure_of_another_rank(case: EngineCase) -> None:
    engine = new_engine(case)
    engine.begin_external("copy", "weights", ())
    if engine.rank == engine.size - 1:
        engine.fail("ValueError: no such file")
        return
    with pytest.raises(PeerFailedError, match=r"no such file.*waiting for it in copy\(weights\)"):
        _check_until_it_fails(engine)
    engine.fail("PeerFailedError")
    with pytest.raises(PeerFailedError):
        engine.barrier()


@several
def test_a_hung_rank_causes_a_timeout(case: EngineCase, monkeypatch) -> None:
    monkeypatch.setattr(failure_detector, "ASK_TIMEOUT_S", 0.7)
    engine = new_engine(case, timeout_s=0.5)
    engine.begin_external("copy", "weights", ())
    if engine.rank == engine.size - 1:
        everyone(engine.size, "hung")
        return
    with pytest.raises(CollectiveTimeoutError, match=r"waited 0.5 s in copy\(weights\).*rank"):
        _check_until_it_fails(engine)
    with pytest.raises(HvdtrainError):
        engine.barrier()
    everyone(engine.size, "timed out")
