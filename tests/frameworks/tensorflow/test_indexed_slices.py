from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.indexed_slices import add_duplicates


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_rows_with_the_same_index_are_added(dtype, shape) -> None:
    values = tf.cast(tf.reshape(tf.range(4 * np.prod(shape, dtype=int)), (4, *shape)), dtype)
    rows = add_duplicates(tf.IndexedSlices(values, tf.constant([5, 2, 5, 0], tf.int64)))
    assert rows.indices.numpy().tolist() == [5, 2, 0]
    assert rows.indices.dtype == tf.int64
    assert rows.values.dtype == dtype
    expected = [values[0] + values[2], values[1], values[3]]
    np.testing.assert_array_equal(rows.values, tf.stack(expected))
    empty = add_duplicates(tf.IndexedSlices(values[:0], tf.zeros([0], tf.int32)))
    assert empty.values.shape == (0, *shape)
