"""``SyncBatchNormalization``, which normalizes with the moments of all ranks' rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from tests.trainer.equivalence import check_close

ROWS = 4
several = pytest.mark.ranks(1, 3)
WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])


def rows(rank: int) -> np.ndarray:
    """Return rows whose mean and number differ between ranks."""
    rng = np.random.default_rng([8, rank])
    return rng.normal(rank, 1 + rank, size=(ROWS + rank, 3)).astype("float32")


@several
@WAYS
def test_synchronized_training_equals_one_process(world, compiled):
    every = np.concatenate([rows(rank) for rank in range(hvd.size())])
    weights = np.random.default_rng(1).normal(size=every.shape).astype("float32")
    start = sum(ROWS + rank for rank in range(hvd.rank()))
    own = slice(start, start + ROWS + hvd.rank())

    def step(layer, x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.nn.tanh(layer(x, training=True)) * weights)
        return tape.gradient(loss, x)

    layer, alone = (
        hvd.SyncBatchNormalization(momentum=0.5),
        keras.layers.BatchNormalization(momentum=0.5),
    )
    layer.build((None, 3))
    alone.build((None, 3))
    call = tf.function(step) if compiled else step
    gradient = call(layer, tf.constant(every[own]), tf.constant(weights[own]))
    expected = step(alone, tf.constant(every), tf.constant(weights))
    check_close(gradient, expected[own])
    check_close(layer.get_weights(), alone.get_weights())


@several
def test_the_layer_can_be_saved_and_loaded(world, tmp_path):
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(center=False)])
    file = tmp_path / f"{hvd.rank()}.keras"
    model.save(file)
    (layer,) = keras.saving.load_model(file).layers
    assert type(layer) is hvd.SyncBatchNormalization
    assert not layer.center


def test_the_argument_fused_is_an_error(world):
    with pytest.raises(ValueError, match="Received fused=True"):
        hvd.SyncBatchNormalization(fused=True)
