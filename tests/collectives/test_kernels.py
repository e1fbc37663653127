"""The arithmetic of reductions, without ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives.kernels import OPS, FiniteCheck, combine, reduce_flat
from tests.collectives.engines import BFLOAT16, DTYPES


def test_contributions_are_added_in_rank_order() -> None:
    """The order matters because (1e16 + 1) - 1e16 is 0, but (1e16 - 1e16) + 1 is 1."""
    big, one = np.array([1e16]), np.ones(1)
    assert reduce_flat([big, one, -big], "sum", 3) == 0
    assert reduce_flat([big, -big, one], "sum", 3) == 1


@pytest.mark.parametrize("op", OPS)
def test_a_single_contribution_is_the_result(op) -> None:
    for dtype in DTYPES:
        array = np.array([1, 0, 1], dtype)
        original = array.copy()
        assert (reduce_flat([array], op, 1) == array).all()
        assert array.tobytes() == original.tobytes()


def test_the_result_may_replace_the_first_contribution() -> None:
    arrays = [np.arange(4.0), np.ones(4), np.ones(4)]
    combine(arrays, "sum", arrays[0])
    assert arrays[0].tolist() == [2, 3, 4, 5]


def test_nan_propagates() -> None:
    for op in OPS:
        for dtype in ("float16", BFLOAT16, "float32", "float64"):
            arrays = np.array([[1.0, np.nan], [np.nan, 1.0], [1.0, 1.0]], dtype)
            assert np.isnan(reduce_flat(list(arrays), op, 3)).all(), (op, dtype)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "float64"], ids=str)
def test_the_finite_check_remembers_earlier_pieces(dtype) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        check = FiniteCheck(np.dtype(dtype))
        check.check(np.ones(10, dtype))
        assert check.passed
        check.check(np.array([1.0, 1.0, bad], dtype))
        check.check(np.ones(10, dtype))
        assert not check.passed
