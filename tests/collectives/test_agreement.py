"""Errors on all ranks after mismatches, failures, exits and hangs.

Each test uses a new engine. ``test_exit_hooks.py`` tests how processes end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from operator import methodcaller
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives import failure_detector
from hvdtrain.collectives.failure_detector import FailureDetector
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    HvdtrainError,
    MismatchError,
    PeerFailedError,
)
from tests.collectives.engines import (
    BFLOAT16,
    EngineCase,
    everyone,
    mpi_of_job,
    new_engine,
    on_engines,
)

CASES = [
    EngineCase(kind="mpi", hosts=(0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 1)),
]


def _pair(method: str, first: list[Any], second: list[Any]) -> tuple[methodcaller, methodcaller]:
    return methodcaller(method, *first), methodcaller(method, *second)


TWO_CALLS = {
    "shape": _pair("allreduce", [np.ones(3)], [np.ones(4)]),
    "dimensions": _pair("allreduce", [np.ones((2, 3))], [np.ones((3, 2))]),
    "dtype": _pair("allreduce", [np.ones(3, np.float16)], [np.ones(3, BFLOAT16)]),
    "op": _pair("allreduce", [np.ones(3), "min"], [np.ones(3), "max"]),
    "number-of-arrays": _pair("grouped_allreduce", [[np.ones(9000)] * 3], [[np.ones(9000)] * 4]),
    "row": _pair("allgather", [np.ones((2, 3))], [np.ones((2, 4))]),
    "root": _pair("broadcast", [np.ones(2), 0], [np.ones(2), 1]),
    "byte-order": _pair("broadcast", [np.ones(2, "<i4")], [np.ones(2, ">i4")]),
    "rows-to-scatter": _pair("reduce_scatter", [np.ones((4, 2))], [np.ones((5, 2))]),
    "row-of-alltoall": _pair("alltoall", [np.ones((6, 2))], [np.ones((6, 3))]),
    "operation": (methodcaller("allreduce", np.ones(30_000)), methodcaller("barrier")),
    "exchange": (methodcaller("allgather", np.ones(3)), methodcaller("broadcast", np.ones(3))),
    "name": (
        methodcaller("allreduce", np.ones(3), name="loss"),
        methodcaller("allreduce", np.ones(3), name="accuracy"),
    ),
    "codec": (
        methodcaller("allgather_object", 1, codec="json"),
        methodcaller("allgather_object", 1, codec="pickle"),
    ),
}


@on_engines(CASES)
@pytest.mark.parametrize("calls", TWO_CALLS.values(), ids=TWO_CALLS)
def test_different_calls(case: EngineCase, calls) -> None:
    """All ranks raise the same error and may continue."""
    engine = new_engine(case)
    last = engine.size - 1
    engine.allreduce(np.ones(3))
    with pytest.raises(MismatchError) as error:
        calls[engine.rank == last](engine)
    text = str(error.value)
    assert everyone(engine.size, text) == [text] * engine.size
    others = ", ".join(str(rank) for rank in range(last))
    assert f"rank {others}: " in text
    assert f"rank {last}: " in text
    assert "Every rank must make the same calls" in text
    for rows in (3, 40_000):
        np.testing.assert_array_equal(engine.allreduce(np.ones(rows)), np.full(rows, engine.size))
    np.testing.assert_array_equal(engine.allgather(np.array([engine.rank])), range(engine.size))


@on_engines([CASES[0]])
def test_long_mismatches_show_the_difference(case: EngineCase) -> None:
    """In this test, one of two hundred shapes differs."""
    engine = new_engine(case)
    arrays = [np.ones((1, index)) for index in range(200)]
    arrays[150] = np.ones((1, 7 + engine.rank))
    with pytest.raises(MismatchError) as error:
        engine.grouped_allreduce(arrays)
    text = str(error.value)
    assert "(1, 149), (1, 7), (1, 151)" in text
    assert "(1, 149), (1, 8), (1, 151)" in text
    assert len(text) < 1000


WAYS_TO_WAIT = {
    "allreduce": lambda e: e.allreduce(np.ones(30_000), name="epoch"),
    "barrier": lambda e: e.barrier(name="epoch"),
    "allgather": lambda e: e.allgather(np.ones(3), name="epoch"),
    "alltoall": lambda e: e.alltoall(np.ones(6), name="epoch"),
    "broadcast_object": lambda e: e.broadcast_object({}, name="epoch"),
}


@on_engines(CASES)
@pytest.mark.parametrize("operation", WAYS_TO_WAIT)
def test_failure_of_another_rank(case: EngineCase, operation: str) -> None:
    engine = new_engine(case)
    last = engine.size - 1
    start_s = time.monotonic()
    if engine.rank == last:
        engine.fail("ValueError: no such file (train.py:12)")
    else:
        with pytest.raises(PeerFailedError) as error:
            WAYS_TO_WAIT[operation](engine)
        text = str(error.value)
        assert text.startswith(f"rank {last} failed: ValueError: no such file (train.py:12). ")
        assert f"Rank {engine.rank} was waiting for it in {operation}(epoch)" in text
        engine.fail("PeerFailedError")  # as an exit hook does
        with pytest.raises(PeerFailedError, match="no such file"):
            engine.allreduce(np.ones(1))
    assert time.monotonic() - start_s < 4


@on_engines([CASES[1]])
def test_long_reasons_are_truncated(case: EngineCase) -> None:
    """A character of several bytes may be cut."""
    engine = new_engine(case)
    if engine.rank == 0:
        engine.fail("x" + "é" * 5000)
        return
    with pytest.raises(PeerFailedError, match="rank 0 failed: xééé"):
        engine.barrier()
    engine.fail("PeerFailedError")


@on_engines(CASES)
def test_a_rank_exits_early(case: EngineCase) -> None:
    engine = new_engine(case)
    last = engine.size - 1
    engine.barrier()
    if engine.rank == last:
        assert not engine.transport.detector.leave(), "MPI must not be finalized"
        return
    reason = rf"rank {last} ended its program.*epoch.*same calls"
    with pytest.raises(PeerFailedError, match=reason) as error:
        engine.barrier(name="epoch")
    engine.fail(str(error.value))  # another rank may receive this first


@pytest.mark.ranks(2)
def test_a_rank_exits_after_the_last_operation() -> None:
    """Other ranks may still be in that operation."""
    mpi = mpi_of_job()
    comm = mpi.COMM_WORLD.Dup()
    started = 5
    detector = FailureDetector(mpi, comm, 30.0, lambda: started)
    if detector.rank == 1:
        assert not detector.leave()
        return
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        detector.check("operation 5")
    started = 6
    with pytest.raises(PeerFailedError, match=r"rank 1 ended its program.* in operation 6"):
        detector.check("operation 6")
    detector.fail("done")


class _EmptyAtFirst:
    """A communicator whose first probe finds no message."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._probed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Improbe(self, *arguments: Any) -> Any:
        probed, self._probed = self._probed, True
        return self._comm.Improbe(*arguments) if probed else None


def _wait(detector: FailureDetector) -> None:
    while True:
        detector.check("operation 1")


@pytest.mark.ranks(3)
def test_simultaneous_failures_are_all_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rank may know of only one failure when it exits."""
    monkeypatch.setattr(failure_detector, "FAREWELL_TIMEOUT_S", 20.0)
    mpi = mpi_of_job()
    comm = mpi.COMM_WORLD.Dup()
    if comm.rank < 2:
        detector = FailureDetector(mpi, _EmptyAtFirst(comm), 30.0, lambda: 0)
        assert detector.fail("here")
        return
    detector = FailureDetector(mpi, comm, 30.0, lambda: 0)
    with pytest.raises(PeerFailedError, match=r"rank [01] failed: here"):
        _wait(detector)
    assert detector.fail("follows")


@on_engines(CASES)
def test_a_hung_rank_causes_a_timeout(case: EngineCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "ASK_TIMEOUT_S", 0.7)
    engine = new_engine(case, timeout_s=0.5)
    last = engine.size - 1
    if engine.rank == last:
        everyone(engine.size, "hung")
        return
    start_s = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as error:
        engine.allreduce(np.ones(3), name="epoch")
    assert time.monotonic() - start_s < 5
    text = str(error.value)
    assert text.startswith(f"rank {engine.rank} waited 0.5 s in allreduce(epoch)")
    assert f"rank {last} is not waiting in any collective" in text
    assert text.endswith("raise HVDTRAIN_TIMEOUT_S.")
    for rank in range(last):
        assert rank == engine.rank or f"rank {rank} waits in allreduce(epoch)" in text
    everyone(engine.size, "timed out")


@on_engines(CASES[:2])
def test_an_engine_refuses_operations_after_an_interrupt(case: EngineCase) -> None:
    """If the rank continued, it would be one operation behind the other ranks."""
    engine = new_engine(case)
    engine.barrier()
    if engine.rank > 0:
        return
    previous = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.allreduce(np.ones(3))
    finally:
        timer.join(60)
        signal.signal(signal.SIGUSR1, previous)
    with pytest.raises(CollectiveError, match=r"early \(KeyboardInterrupt.*in step"):
        engine.allreduce(np.ones(3))


@on_engines([EngineCase(kind="single", hosts=(0,)), *CASES])
def test_operations_after_close_are_errors(case: EngineCase) -> None:
    engine = new_engine(case)
    engine.close()
    engine.close()
    for operation in WAYS_TO_WAIT.values():
        with pytest.raises(HvdtrainError, match=r"after hvdtrain.shutdown\(\); call hvdtrain.init"):
            operation(engine)


@on_engines(CASES[:2])
def test_operations_of_two_threads_run_one_after_the_other(case: EngineCase) -> None:
    engine = new_engine(case)
    results = []
    if engine.rank == 0:
        first = threading.Thread(
            target=lambda: results.append(engine.allreduce(np.ones(2), name="first"))
        )
        first.start()
        time.sleep(0.2)
        results.append(engine.allreduce(np.full(2, 2.0), name="second"))
        first.join(60)
    else:
        time.sleep(0.5)
        results.append(engine.allreduce(np.ones(2), name="first"))
        results.append(engine.allreduce(np.full(2, 2.0), name="second"))
    assert [list(result) for result in results] == [[engine.size] * 2, [2 * engine.size] * 2]


@pytest.mark.parametrize("chunk_bytes", [1, 63, 100, 4097])
@pytest.mark.parametrize("kind", ["mpi", "shared_memory"])
@pytest.mark.ranks(2)
def test_unusual_chunk_sizes(kind: str, chunk_bytes: int) -> None:
    engine = new_engine(EngineCase(kind=kind, hosts=(0, 0), chunk_bytes=chunk_bytes))
    for dtype in ("float64", "float16", "int8"):
        array = np.arange(97).astype(dtype)
        np.testing.assert_array_equal(engine.allreduce(array), (2 * np.arange(97)).astype(dtype))
