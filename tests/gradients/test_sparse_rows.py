from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdtrain.gradients.sparse_rows import pack_rows, unpack_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_unpack_separates_the_rows_of_ranks(dtype, index, shape) -> None:
    ranks = [
        (np.arange(n * np.prod(shape)).reshape(n, *shape).astype(dtype), np.arange(n, dtype=index))
        for n in (4, 0, 1)
    ]
    packed = [
        pack_rows(values, indices, np.array(weight, dtype))
        for (values, indices), weight in zip(ranks, (1.5, 0.0, 0.5))
    ]
    for own in ranks:
        values, indices, weights = unpack_rows(np.concatenate(packed), *own)
        assert (values.dtype, indices.dtype) == (dtype, index)
        np.testing.assert_array_equal(values, np.concatenate([v for v, _ in ranks]))
        np.testing.assert_array_equal(indices, np.concatenate([i for _, i in ranks]))
        assert weights.tolist() == [1.5, 0.0, 0.5]
