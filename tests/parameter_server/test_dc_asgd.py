"""Delay compensation by itself; tests of servers have its arithmetic on whole trainings."""

import numpy as np
import pytest

from hvdtrain.parameter_server.gradients import Rows, pack_gradients
from hvdtrain.parameter_server.sharding import Spec, numpy_dtype, shard_variables
from hvdtrain.parameter_server.updates import DelayCompensation


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_squares_of_half_types_do_not_overflow(dtype):
    """Dense gradients and rows, a variable without a gradient between them."""
    specs = [Spec(name, (4, 2), dtype) for name in ("dense", "none", "rows")]
    (shard,) = shard_variables(specs, 1)
    weights, flat = (np.zeros(shard.nbytes, np.uint8) for _ in range(2))
    compensation = DelayCompensation(0.5, shard)
    for view in shard.views(weights):
        view.fill(1.0)
    compensation.sent(3, weights)
    for view in shard.views(weights):
        view.fill(1.0078125)  # 1/128 more
    dense = np.full((4, 2), 512.0, numpy_dtype(dtype))
    rows = Rows(np.array([2, 0, 2]), np.full((3, 2), 256.0, numpy_dtype(dtype)))
    parts = pack_gradients(shard, specs, [dense, None, rows], flat)
    corrected = compensation.correct(3, parts, weights)
    assert corrected.missing == [1]
    assert corrected.by_piece()[0].tolist() == [[1536.0, 1536.0]] * 4
    found = corrected.rows[2]
    assert found.values.dtype == numpy_dtype(dtype)
    assert found.indices.tolist() == [0, 2]
    assert found.values.tolist() == [[512.0, 512.0], [1536.0, 1536.0]]
    assert corrected.kinds.tolist() == [-2, -1, 2]
