"""Sections, which all ranks leave after an error, so that they can start the next one."""

from __future__ import annotations

import contextlib
import logging
import time

import numpy as np
import pytest

from hvdtrain.collectives import failure_detector
from hvdtrain.errors import CollectiveError, MismatchError, PeerFailedError
from tests.collectives.engines import EngineCase, everyone, new_engine, on_engines

CASES = [
    EngineCase(kind="mpi", hosts=(0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 1)),
]
WAYS_TO_WAIT = {
    "allreduce": lambda e: e.allreduce(np.ones(30_000), name="epoch"),
    "small-allreduce": lambda e: e.allreduce(np.ones(3), name="epoch"),
    "alltoall": lambda e: e.alltoall(np.ones(6), name="epoch"),
    "broadcast_object": lambda e: e.broadcast_object({}, name="epoch"),
    "end": lambda e: None,
}


def assert_in_step(engine) -> None:
    """Check that all ranks are at the same point and in the same section."""
    with engine.section("next"):
        assert engine.allgather_object(engine.sections, name="s") == [engine.sections] * engine.size
        np.testing.assert_array_equal(engine.allreduce(np.ones(40_000)), engine.size)


@on_engines(CASES)
@pytest.mark.parametrize("operation", WAYS_TO_WAIT)
def test_all_ranks_leave_after_an_error_of_one(case: EngineCase, operation: str) -> None:
    engine = new_engine(case)
    last = engine.size - 1
    expected = ValueError if engine.rank == last else PeerFailedError

    def fit() -> None:
        with engine.section("fit"):
            if engine.rank == last:
                raise ValueError("no space left")
            WAYS_TO_WAIT[operation](engine)

    with pytest.raises(expected) as error:
        fit()
    if engine.rank != last:
        title = "barrier(end of fit)" if operation == "end" else "(epoch)"
        assert str(error.value).startswith(f"rank {last} failed: ValueError: no space left (")
        assert title in str(error.value)
    assert_in_step(engine)


@on_engines(CASES[:2])
def test_each_rank_raises_its_own_error(case: EngineCase) -> None:
    engine = new_engine(case)
    with pytest.raises(ValueError, match=f"^{engine.rank}$"), engine.section("fit"):
        raise ValueError(str(engine.rank))
    assert_in_step(engine)


@on_engines(CASES[1:])
def test_the_errors_of_all_failed_ranks_are_reported(case: EngineCase) -> None:
    engine = new_engine(case)
    expected = r"rank 0 failed: KeyError: 'a'.*; rank 2 failed: KeyError: 'a'"
    with contextlib.suppress(KeyError), engine.section("fit"):
        if engine.rank != 1:
            raise KeyError("a")
        with pytest.raises(PeerFailedError, match=expected):
            engine.barrier()
        # The error is raised again until the section ends.
        with pytest.raises(PeerFailedError, match=expected):
            engine.barrier()
        raise KeyError("of the section")
    assert_in_step(engine)


@on_engines(CASES)
def test_different_sections_are_an_error_on_all_ranks(case: EngineCase) -> None:
    engine = new_engine(case)
    name = "evaluate" if engine.rank == 0 else "fit"
    with (
        pytest.raises(MismatchError, match=r"begin\(evaluate\).*begin\(fit\) with model 1"),
        engine.section(name, () if engine.rank == 0 else ("model 1",)),
    ):
        pytest.fail("must not start")
    assert_in_step(engine)


@on_engines(CASES[:2])
def test_all_ranks_leave_after_a_mismatch(case: EngineCase) -> None:
    engine = new_engine(case)
    with pytest.raises(MismatchError), engine.section("fit"):
        engine.barrier(name=str(engine.rank))
    assert_in_step(engine)


@on_engines(CASES[:2])
def test_nested_sections_end_with_the_outer_section(case: EngineCase) -> None:
    engine = new_engine(case)
    expected = ValueError if engine.rank == 0 else PeerFailedError

    def fit() -> None:
        with engine.section("fit"):
            with engine.section("evaluate"):
                engine.barrier()
            with engine.section("evaluate"):
                if engine.rank == 0:
                    raise ValueError
                engine.barrier()

    with pytest.raises(expected):
        fit()
    assert_in_step(engine)


@on_engines(CASES[:2])
@pytest.mark.parametrize("way", ["interrupted", "abort", "exit"])
def test_all_ranks_get_errors_if_they_are_out_of_step(
    case: EngineCase, way: str, monkeypatch
) -> None:
    """Ranks are out of step after an interrupted operation, or a failure without operations."""
    engine = new_engine(case)
    fails = engine.rank == 0
    error = {"interrupted": KeyboardInterrupt, "abort": ValueError, "exit": SystemExit}[way]
    with contextlib.suppress(error, PeerFailedError), engine.section("fit"):
        if fails and way == "interrupted":

            def interrupt(call) -> bool:
                raise KeyboardInterrupt

            monkeypatch.setattr(engine.transport, "agree", interrupt)
        elif fails:
            with engine.abort_on_error() if way == "abort" else contextlib.nullcontext():
                raise error
        engine.barrier()
    for _ in range(2):
        with (
            pytest.raises(CollectiveError, match=r"End the program|rank 0 failed"),
            engine.section("next"),
        ):
            pytest.fail("must not start")


@on_engines(CASES)
def test_a_wait_without_timeout_has_no_limit(
    case: EngineCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failure_detector, "ASK_TIMEOUT_S", 0.2)
    engine = new_engine(case, timeout_s=0.5)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        everyone(engine.size, None)
        if engine.rank == engine.size - 1:
            time.sleep(2.0)
        with engine.without_timeout():
            engine.barrier(name="model is saved")
    if engine.rank == 0:
        last = engine.size - 1
        assert f"s in barrier(model is saved) for rank {last}" in caplog.text
    np.testing.assert_array_equal(engine.allreduce(np.ones(3)), engine.size)


@on_engines(CASES[:1])
def test_a_failure_ends_a_wait_without_timeout(case: EngineCase) -> None:
    engine = new_engine(case)
    if engine.rank == 1:
        engine.fail("ValueError: disk full")
        return
    with pytest.raises(PeerFailedError, match="disk full"), engine.without_timeout():
        engine.barrier()
    engine.fail("PeerFailedError")
