from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.gradients.indexed_slices import pack_rows, unique_rows, unpack_rows


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_unique_rows_adds_up_rows_with_the_same_index(dtype, shape) -> None:
    values = tf.cast(tf.reshape(tf.range(4 * np.prod(shape, dtype=int)), (4, *shape)), dtype)
    rows = unique_rows(tf.IndexedSlices(values, tf.constant([5, 2, 5, 0], tf.int64)))
    assert rows.indices.numpy().tolist() == [5, 2, 0]
    assert rows.indices.dtype == tf.int64
    assert rows.values.dtype == dtype
    expected = [values[0] + values[2], values[1], values[3]]
    np.testing.assert_array_equal(rows.values, tf.stack(expected))
    empty = unique_rows(tf.IndexedSlices(values[:0], tf.zeros([0], tf.int32)))
    assert empty.values.shape == (0, *shape)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_unpack_separates_the_rows_of_ranks(dtype, index, shape) -> None:
    kind = dtype.as_numpy_dtype
    ranks = [
        (np.arange(n * np.prod(shape)).reshape(n, *shape).astype(kind), np.arange(n, dtype=index))
        for n in (4, 0, 1)
    ]
    packed = [
        pack_rows(values, indices, np.array(weight, kind))
        for (values, indices), weight in zip(ranks, (1.5, 0.0, 0.5))
    ]
    for own in ranks:
        values, indices, weights = unpack_rows(np.concatenate(packed), *own)
        assert (values.dtype, indices.dtype) == (kind, index)
        np.testing.assert_array_equal(values, np.concatenate([v for v, _ in ranks]))
        np.testing.assert_array_equal(indices, np.concatenate([i for _, i in ranks]))
        assert weights.tolist() == [1.5, 0.0, 0.5]
