"""Names of a model that do not depend on the layers created before."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain import world as job
from hvdtrain.frameworks.variable_names import renumbered, variable_name, without_counts


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["dense/kernel", "dense/bias"], ["dense/kernel", "dense/bias"]),
        (["dense_7/kernel", "dense_7/bias"], ["dense/kernel", "dense/bias"]),
        (["dense_7/bias", "dense_10/bias"], ["dense/bias", "dense_1/bias"]),
        (["dense_10/bias", "dense_7/bias"], ["dense_1/bias", "dense/bias"]),
        (["dense/bias", "dense_3/bias"], ["dense/bias", "dense_1/bias"]),
        (["model_4/dense_9/bias", "model_4/conv_9/bias"], ["model/dense/bias", "model/conv/bias"]),
        (["block_1_conv/kernel"], ["block_1_conv/kernel"]),
        (["Variable_2:0", "Variable:0"], ["Variable_1:0", "Variable:0"]),
        (["_3", "7", "_", ""], ["_3", "7", "_", ""]),
    ],
)
def test_renumbered(names: list[str], expected: list[str]) -> None:
    assert renumbered(names) == expected
    assert renumbered(expected) == expected


def test_without_counts() -> None:
    assert without_counts("model_3/dense_7/bias") == "model/dense/bias"
    assert without_counts("sgd_3/dense_7_kernel_momentum:0") == "sgd/dense_kernel_momentum:0"
    assert without_counts("conv2d_1") == "conv2d"


@pytest.fixture
def uneven(world):
    """Let rank 0 create more layers than other ranks. The numbers are reset afterwards."""
    for _ in range(3 if job.rank() == 0 else 0):
        keras.layers.Dense(1)
        tf.keras.models.Sequential([])
    yield
    keras.utils.clear_session()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("embedded", [False, True], ids=["dense", "rows"])
def test_ranks_may_have_created_different_numbers_of_layers(uneven: None, embedded: bool) -> None:
    first = keras.layers.Embedding(5, 3) if embedded else keras.layers.Dense(3)
    normalized = keras.layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([first, keras.layers.Flatten(), normalized, keras.layers.Dense(1)])
    data = np.random.default_rng(0).integers(0, 5, [8, 2])
    model.build(data.shape)
    paths = job.collectives().allgather_object([v.path for v in model.trainable_variables])
    assert paths[0] != paths[1], "the names must differ in this test"

    hvdtrain.broadcast_variables(model.variables)
    with hvdtrain.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean(model(tf.constant(data, "float32")))
    gradients = tape.gradient(loss, model.trainable_variables)
    assert all(gradient is not None for gradient in gradients)

    model.compile(optimizer="sgd", loss="mse")
    hvdtrain.distribute(model)
    model.fit(data, np.ones([8, 1]), batch_size=4, verbose=0)


def test_names() -> None:
    dense = keras.layers.Dense(2, name="head")
    dense.build((None, 3))
    assert variable_name(dense.kernel) == "head/kernel"
    assert variable_name(tf.Variable(1.0, name="w")) == "w:0"
    assert variable_name(tf.constant(1.0)) == "tensor"
