"""Gradients of several steps, added up."""

import numpy as np
import pytest

from hvdtrain.parameter_server.gradient_packing import Rows
from hvdtrain.parameter_server.push_accumulation import AccumulatedPush
from hvdtrain.parameter_server.sharding import numpy_dtype


def rows(indices, *values):
    return Rows(np.array(indices), np.array(values, "float32"))


def test_the_sum_of_some_steps():
    """Dense gradients, rows, variables that some steps or all have none of; nothing is kept."""
    accrued = AccumulatedPush(3)
    first = np.array([1.0, 2.0], "float32")
    accrued.add([first, rows([4, 1, 4], [1, 1], [2, 2], [3, 3]), None, None])
    first.fill(99)
    assert not accrued.complete
    accrued.add(None)
    assert (accrued.steps, accrued.complete) == (2, False)
    accrued.add([first, rows([0, 1], [5, 5], [6, 6]), np.array(7.0, "float32"), None])
    assert accrued.complete
    dense, sparse, scalar, none = accrued.take()
    assert dense.tolist() == [100.0, 101.0]
    assert sparse.indices.tolist() == [0, 1, 4]
    assert sparse.values.tolist() == [[5, 5], [8, 8], [4, 4]]
    assert scalar.tolist() == 7.0
    assert none is None
    assert (accrued.steps, accrued.complete) == (0, False)
    accrued.add([None, rows([3], [1, 1]), None, None])
    assert [gradient is None for gradient in accrued.take()] == [True, False, True, True]


def test_steps_without_gradients():
    accrued = AccumulatedPush(2)
    accrued.add(None)
    accrued.add(None)
    assert accrued.complete
    assert accrued.take() is None
    assert not accrued.complete


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_summed_exactly(dtype):
    accrued = AccumulatedPush(4)
    kind = numpy_dtype(dtype)
    for value in (4096.0, 2.0, 2.0, -4096.0):
        values = np.full(2, value, kind)
        accrued.add([values, Rows(np.array([1]), values.reshape(1, 2))])
    dense, sparse = accrued.take()
    assert dense.dtype == sparse.values.dtype == kind
    assert dense.tolist() == [4.0, 4.0]
    assert sparse.values.tolist() == [[4.0, 4.0]]
