"""Functions that are compiled if XLA supports their operations."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.xla import compiled_if_possible


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_padded_rows_change_nothing(rows):
    values = np.arange(2 * rows, dtype="float32").reshape(rows, 2) + 1.0
    indices = np.arange(rows, dtype="int32") % 3
    variable = tf.Variable(np.ones((3, 2), "float32"))

    @tf.function(
        input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)], autograph=False
    )
    def update(values, indices):
        def subtract(padded):
            variable.scatter_sub(padded)
            return tf.convert_to_tensor(padded), tf.shape(padded.indices)[0]

        gradient = tf.IndexedSlices(values, indices, tf.constant([3, 2]))
        return compiled_if_possible("a test", subtract, gradient)

    dense, size = update(values, indices)
    expected = np.zeros((3, 2), "float32")
    np.add.at(expected, indices, values)
    np.testing.assert_array_equal(dense, expected)
    np.testing.assert_array_equal(variable, 1.0 - expected)
    assert int(size) == {0: 1, 1: 1, 5: 8, 8: 8}[rows]


@pytest.mark.parametrize("nested", [False, True])
def test_functions_with_unsupported_operations_run_without_xla(caplog, nested):
    def double(value):
        return tf.numpy_function(lambda array: 2 * array, [value], tf.float32)

    @tf.function(autograph=False)
    def step(value):
        def choose():
            return tf.cond(value > 0, lambda: double(value), lambda: tf.ensure_shape(value, []))

        what = f"a test, {nested}"
        return compiled_if_possible(what, choose if nested else lambda: double(value))

    assert float(step(tf.constant(3.0))) == 6.0
    assert f"ignored for a test, {nested}, because XLA does not support PyFunc" in caplog.text
