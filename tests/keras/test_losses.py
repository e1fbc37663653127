"""Losses, weights of samples and masks: each equals one process on the joint batch."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

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


TOKENS = np.random.default_rng(5).integers(0, 7, (ROWS, 6))  # zeros are masked
TOKENS[:4] = 0  # the first rank's first batch has no valid value
LABELS = np.where(np.arange(ROWS) % 3 == 1, -1, Y)
WHOLE = 36  # Keras gives each batch the same weight in the losses of single outputs
WEIGHTS = np.random.default_rng(4).random(ROWS).astype("float32")


class Smallest(keras.losses.Loss):
    """Masks the largest errors of its own accord."""

    def call(self, y_true, y_pred):
        errors = tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
        errors._keras_mask = errors < 1.0
        return errors


def tagger(*losses: Any, head: Any, **options: Any) -> keras.Model:
    """A model of masked tokens with an output for each loss."""
    keras.utils.set_random_seed(3)
    tokens = keras.Input((6,))
    embedded = keras.layers.Embedding(7, 4, mask_zero=True)(tokens)
    outputs = [layer(embedded) for layer in head()]
    model = keras.Model(tokens, outputs if len(outputs) > 1 else outputs[0])
    model.compile(keras.optimizers.SGD(0.1), list(losses), **options)
    return model


def cross_entropy(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def pooled(name: str) -> keras.layers.Layer:
    layers = [keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(3)]
    return keras.Sequential(layers, name=name)


def regularized(loss: keras.losses.Loss, units: int = 3) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(units, "tanh", kernel_regularizer="l2")]
    )
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "ignore_class": (lambda: regularized(cross_entropy(ignore_class=-1)), X, LABELS, None),
    "mask of its own": (lambda: regularized(Smallest(), 6), X, X, None),
    "ignore_class, weights": (
        lambda: regularized(cross_entropy(ignore_class=-1, reduction="mean_with_sample_weight")),
        X,
        LABELS,
        WEIGHTS,
    ),
    "reduction None": (
        lambda: classifier(
            loss=cross_entropy(reduction=None), optimizer=keras.optimizers.SGD(0.01)
        ),
        X,
        Y,
        None,
    ),
    "sequences": (
        lambda: tagger(cross_entropy(), head=lambda: [keras.layers.Dense(7)]),
        TOKENS,
        TOKENS,
        None,
    ),
    "one of two masked": (
        lambda: tagger(
            cross_entropy(),
            cross_entropy(),
            head=lambda: [keras.layers.Dense(7, name="tags"), pooled("label")],
            loss_weights=[1.0, 0.5],
        ),
        TOKENS[:WHOLE],
        [TOKENS[:WHOLE], Y[:WHOLE]],
        None,
    ),
    "two reductions": (
        lambda: tagger(
            cross_entropy(reduction="sum"),
            cross_entropy(),
            head=lambda: [pooled("one"), pooled("other")],
            loss_weights=[0.1, 1.0],
        ),
        TOKENS[:WHOLE],
        [Y[:WHOLE], Y[:WHOLE]],
        None,
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", CASES)
def test_losses_that_are_no_means_over_rows(world, case):
    make, x, y, sample_weight = CASES[case]

    def train(distribute: bool) -> tuple[list[Any], dict[str, list[float]]]:
        model = make()
        size = 12
        if distribute:
            world.distribute(model)
            size //= world.size()
        options = {"batch_size": size, "verbose": 0, "sample_weight": sample_weight}
        validation = (x, y) if sample_weight is None else (x, y, sample_weight)
        history = model.fit(
            x, y, epochs=2, shuffle=False, validation_data=validation, **options
        ).history
        history |= {
            f"evaluated {n}": v
            for n, v in model.evaluate(x, y, return_dict=True, **options).items()
        }
        return model.get_weights(), history

    alone, expected = train(distribute=False)
    together, found = train(distribute=True)
    for one, other in zip(alone, together):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-6)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=name)


@pytest.mark.ranks(2)
def test_masked_sequences_compiled_by_xla(world):
    compare(
        world,
        lambda: tagger(cross_entropy(), head=lambda: [keras.layers.Dense(7)], jit_compile=True),
        lambda model, size: model.fit(TOKENS, TOKENS, batch_size=size, shuffle=False, verbose=0),
    )


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
