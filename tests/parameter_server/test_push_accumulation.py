"""Gradients of several steps, added up."""

import numpy as np
import pytest

from hvdtrain.parameter_server.gradients import GradientSum, Rows
from hvdtrain.parameter_server.sharding import numpy_dtype


def rows(indices, *values):
    return Rows(np.array(indices), np.array(values, "float32"))


def test_the_sum_of_some_steps():
    """Dense gradients, rows, variables that some steps or all have none of; nothing is kept."""
    accrued = GradientSum()
    first = np.array([1.0, 2.0], "float32")
    accrued.add([first, rows([4, 1, 4], [1, 1], [2, 2], [3, 3]), None, None])
    first.fill(99)
    assert accrued.steps == 1
    accrued.add(None)
    assert accrued.steps == 2
    accrued.add([first, rows([0, 1], [5, 5], [6, 6]), np.array(7.0, "float32"), None])
    assert accrued.steps == 3
    dense, sparse, scalar, none = accrued.take()
    assert dense.tolist() == [100.0, 101.0]
    assert sparse.indices.tolist() == [0, 1, 4]
    assert sparse.values.tolist() == [[5, 5], [8, 8], [4, 4]]
    assert scalar.tolist() == 7.0
    assert none is None
    assert accrued.steps == 0
    accrued.add([None, rows([3], [1, 1]), None, None])
    assert [gradient is None for gradient in accrued.take()] == [True, False, True, True]


def test_steps_without_gradients():
    accrued = GradientSum()
    accrued.add(None)
    accrued.add(None)
    assert accrued.steps == 2
    assert accrued.take() is None
    assert accrued.steps == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_summed_exactly(dtype):
    accrued = GradientSum()
    kind = numpy_dtype(dtype)
    for value in (4096.0, 2.0, 2.0, -4096.0):
        values = np.full(2, value, kind)
        accrued.add([values, Rows(np.array([1]), values.reshape(1, 2))])
    dense, sparse = accrued.take()
    assert dense.dtype == sparse.values.dtype == kind
    assert dense.tolist() == [4.0, 4.0]
    assert sparse.values.tolist() == [[4.0, 4.0]]
