"""Ranks that join because they have run out of data, while other ranks continue."""

import numpy as np
import pytest

from hvdtrain.collectives.kernels import OPS, is_floating
from hvdtrain.errors import MismatchError, NonFiniteError
from tests.collectives.engines import (
    CASES,
    DTYPES,
    EVERY_ENGINE,
    expected,
    new_engine,
    on_engines,
    values,
)

EVERY_NEW_ENGINE = on_engines([case for case in CASES if case.kind != "single"])


@EVERY_ENGINE
@pytest.mark.parametrize("backwards", [False, True])
def test_ranks_run_out_of_data_one_after_another(subject, backwards):
    engine = subject.engine
    size, rank = engine.size, engine.rank
    order = sorted(range(size), reverse=backwards)
    for step in range(order.index(rank)):
        left = order[step + 1 :]
        total = sum(other + 1.0 for other in left)
        for items in (1, 3000):
            array = np.full((items, 2), rank + 1.0)
            np.testing.assert_array_equal(
                engine.allreduce(array, name="sum"), np.full((items, 2), total)
            )
            mean = engine.allreduce(array, "average", name="mean")
            np.testing.assert_allclose(mean, np.full((items, 2), total / size))
        result = engine.allgather_object({"rank": rank}, name="who", codec="json")
        assert result == [{"rank": other} for other in sorted(left)]
    assert engine.join() == order[-1]
    np.testing.assert_array_equal(engine.allgather(np.array([rank])), np.arange(size))
    assert engine.join() == size - 1


@EVERY_ENGINE
@pytest.mark.parametrize("op", OPS)
def test_joined_ranks_do_not_change_results(subject, op):
    """The only exception is the divisor of an average, which is the number of all ranks."""
    engine = subject.engine
    size = engine.size
    left = max(1, size - 1)
    refused = {"average": "iub", "sum": "b"}.get(op, "")
    if engine.rank < left:
        for dtype in DTYPES:
            if dtype.kind in refused and not is_floating(dtype):
                continue
            for shape in [(), (7,), (2, 900)]:
                result = engine.allreduce(values(engine.rank, shape, dtype), op, name="step")
                if op == "average":
                    reference = expected("sum", left, shape, values, dtype).astype("float64") / size
                else:
                    reference = expected(op, left, shape, values, dtype)
                assert result.dtype == dtype
                np.testing.assert_allclose(
                    result.astype("float64"), reference.astype("float64"), rtol=5e-3
                )
    assert engine.join() in (size - 1, left - 1)


@EVERY_ENGINE
def test_non_finite_values_are_an_error_for_the_sender(subject):
    engine = subject.engine
    if engine.rank == 0 and engine.size > 1:
        bad = np.zeros(5000, "float32")
        for place in (0, 2500, 4999):
            bad[place] = np.nan
            for group in ([bad], [bad, bad[:3].copy()]):
                with pytest.raises(NonFiniteError):
                    engine.grouped_allreduce(group, name="bad", require_finite=True)
        good = np.ones(5000, "float32")
        (result,) = engine.grouped_allreduce([good], name="good", require_finite=True)
        np.testing.assert_array_equal(result, good)
    engine.join()


@EVERY_NEW_ENGINE
@pytest.mark.parametrize("what", ["broadcast", "allgather", "barrier"])
def test_operations_that_need_all_ranks_are_an_error(case, what):
    engine = new_engine(case)
    calls = {
        "broadcast": lambda: engine.broadcast(np.ones(3), 0, name="x"),
        "allgather": lambda: engine.allgather(np.ones(3), name="x"),
        "barrier": lambda: engine.barrier(name="x"),
    }
    text = rf"Rank 1 called join, and the others called {what}\(x\).*only call allreduce"
    with pytest.raises(MismatchError, match=text):
        engine.join() if engine.rank == 1 else calls[what]()
    np.testing.assert_array_equal(engine.allreduce(np.ones(3)), np.full(3, engine.size))
    assert engine.join() == engine.size - 1


@EVERY_NEW_ENGINE
def test_a_mismatch_of_the_other_ranks(case):
    engine = new_engine(case)
    if engine.size == 2:
        return
    call = engine.join if engine.rank == 1 else lambda: engine.allreduce(np.ones(3 + engine.rank))
    with pytest.raises(MismatchError, match="Ranks made different calls"):
        call()
