"""Losses, weights of samples and masks: each equals one process on the joint batch."""

import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from tests.keras.features import ROWS, X, Y, classifier, compare, train_arrays


@pytest.mark.ranks(2)
def test_class_weights(world):
    compare(
        world,
        classifier,
        lambda model, size: train_arrays(model, size, class_weight={0: 1.0, 1: 3.0, 2: 0.2}),
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_other_loss_reductions(world, reduction):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    sample_weight = np.random.default_rng(4).random(ROWS).astype("float32")
    optimizer = keras.optimizers.SGD
    compare(
        world,
        lambda: classifier(optimizer=optimizer(0.01), loss=loss),
        lambda model, size: train_arrays(model, size, sample_weight=sample_weight),
    )


@pytest.mark.ranks(2)
def test_losses_that_no_one_weight_fits_are_refused(world):
    x = keras.Input((6,))
    model = keras.Model(x, [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)])
    losses = [keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError(reduction="sum")]
    model.compile("sgd", losses)
    world.distribute(model)
    with pytest.raises(ModelError, match="reduced in different ways"):
        model.fit(X, [X[:, :1], X[:, :1]], batch_size=4, verbose=0)


@pytest.mark.ranks(2)
def test_masked_sequences(world):
    tokens = np.random.default_rng(5).integers(0, 7, (ROWS, 6))  # zeros are masked

    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.Embedding(7, 4, mask_zero=True), layers.Dense(7)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    def train(model: keras.Model, size: int) -> None:
        model.fit(tokens, tokens, batch_size=size, epochs=2, shuffle=False, verbose=0)

    compare(world, make, train)


@pytest.mark.ranks(2)
def test_several_inputs_outputs_and_losses(world):
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second")
        joined = keras.layers.Dense(5, "relu")(keras.layers.add([first, second]))
        outputs = {
            "label": keras.layers.Dense(3, name="label")(joined),
            "value": keras.layers.Dense(1, name="value")(joined),
        }
        model = keras.Model({"first": first, "second": second}, outputs)
        model.compile(
            keras.optimizers.Adam(0.01),
            loss={
                "label": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "value": "mse",
            },
            loss_weights={"label": 1.0, "value": 0.3},
            metrics={"label": "accuracy", "value": "mae"},
        )
        return model

    def train(model: keras.Model, size: int) -> None:
        inputs, targets = {"first": X, "second": X[::-1]}, {"label": Y, "value": X[:, :1]}
        model.fit(inputs, targets, batch_size=size, epochs=2, shuffle=False, verbose=0)

    compare(world, make, train)
