"""Ragged and sparse tensors of TensorFlow as input, also on Keras' other backends."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import DataError
from tests.trainer.data.ranks import on_ranks, read, shard, shard_on_ranks
from tests.trainer.data.test_arrays import check_kind

ROWS = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0], [7.0]]


@pytest.mark.parametrize("convert", [tf.RaggedTensor.from_tensor, tf.sparse.from_dense])
def test_kinds_of_arrays(convert) -> None:
    check_kind(convert)


@pytest.mark.parametrize("sparse", [False, True])
def test_components_of_a_pipeline(sparse: bool) -> None:
    """Other backends pad ragged rows; JAX keeps sparse ones."""
    ragged = tf.ragged.constant(ROWS)
    x = tf.sparse.from_dense(ragged.to_tensor()) if sparse else ragged

    def make(_: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, tf.range(5))).batch(2)

    for share in shard_on_ranks(2, make):
        for step in read(share):
            data, ids = step.batch
            for row, number in zip(keras.ops.convert_to_numpy(data), np.asarray(ids)):
                assert row[row > 0].tolist() == ROWS[number]


def test_components_with_text_are_read_on_tensorflow_only() -> None:
    def run(engine):
        dataset = tf.data.Dataset.from_tensor_slices((["a", "b", "c"], tf.range(3))).batch(1)
        return read(shard(engine, dataset))

    for result in on_ranks(2, run):
        if keras.backend.backend() == "tensorflow":
            assert [step.batch[0].dtype for step in result] == [tf.string] * 2
        else:
            assert isinstance(result, DataError)
            assert "x must consist of numbers" in str(result)
