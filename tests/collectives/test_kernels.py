"""The arithmetic of reductions, without ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives.kernels import (
    OPS,
    FiniteCheck,
    accumulator_dtype,
    combine,
    finish,
)
from tests.collectives.engines import BFLOAT16, DTYPES


def _combined(arrays, op: str) -> np.ndarray:
    arrays = [np.asarray(array) for array in arrays]
    wide = accumulator_dtype(arrays[0].dtype)
    out = np.empty(arrays[0].size, wide)
    combine(arrays, op, out, np.empty(arrays[0].size, wide))
    finish(out, op, len(arrays))
    return out


def test_contributions_are_added_in_rank_order() -> None:
    """(1e16 + 1) + -1e16 loses the one, (1e16 + -1e16) + 1 does not."""
    assert _combined([[1e16], [1.0], [-1e16]], "sum") == 0
    assert _combined([[1e16], [-1e16], [1.0]], "sum") == 1


@pytest.mark.parametrize("op", OPS)
def test_one_contribution_stays_what_it_is(op) -> None:
    for dtype in DTYPES:
        array = np.array([1, 0, 1], dtype)
        kept = array.copy()
        assert (_combined([array], op) == array).all()
        assert array.tobytes() == kept.tobytes()


def test_result_may_take_the_place_of_the_first_contribution() -> None:
    arrays = [np.arange(4.0), np.ones(4), np.ones(4)]
    combine(arrays, "sum", arrays[0])
    assert arrays[0].tolist() == [2, 3, 4, 5]


def test_nan_wins() -> None:
    for op in OPS:
        for dtype in ("float16", BFLOAT16, "float32", "float64"):
            arrays = np.array([[1.0, np.nan], [np.nan, 1.0], [1.0, 1.0]], dtype)
            assert np.isnan(_combined(list(arrays), op)).all(), (op, dtype)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "float64"], ids=str)
def test_finite_check_looks_at_each_piece(dtype) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        check = FiniteCheck(np.dtype(dtype))
        check.look(np.ones(10, dtype))
        assert check.passed
        check.look(np.array([1.0, 1.0, bad], dtype))
        check.look(np.ones(10, dtype))
        assert not check.passed, "later pieces wash it off"
