"""Losses, sample weights and masks, compared with one process on the joint batch."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.trainer.equivalence import check_close
from tests.trainer.features import ROWS, X, Y, classifier, compare

TOKENS = np.random.default_rng(5).integers(0, 7, (ROWS, 6))  # zeros are masked
TOKENS[:4] = 0  # all values in the first rank's first batch are masked
LABELS = np.where(np.arange(ROWS) % 3 == 1, -1, Y)
WHOLE = 36  # full batches, as Keras weights batches equally in the losses of single outputs
WEIGHTS = np.random.default_rng(4).random(ROWS).astype("float32")


class Smallest(keras.losses.Loss):
    """A loss that masks the largest errors."""

    def call(self, y_true, y_pred):
        errors = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        errors._keras_mask = errors < 1.0
        return errors


def tagger(*losses: Any, head: Any, **options: Any) -> keras.Model:
    """Return a model of masked tokens with an output for each loss."""
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
    "own mask": (lambda: regularized(Smallest(), 6), X, X, None),
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_losses_other_than_means_over_rows(world, case):
    check_losses(world, case)


@pytest.mark.ranks(2)
@pytest.mark.backends("torch", "jax")
@pytest.mark.parametrize("case", ["ignore_class, weights", "sequences", "one of two masked"])
def test_losses_on_other_backends(world, keras_backend, case):
    check_losses(world, case)


def check_losses(world, case):
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
    check_close(together, alone, "weights")
    check_close(found, expected)


@pytest.mark.ranks(2)
def test_masked_sequences_compiled_by_xla(world):
    compare(
        world,
        lambda: tagger(cross_entropy(), head=lambda: [keras.layers.Dense(7)], jit_compile=True),
        lambda model, size: model.fit(TOKENS, TOKENS, batch_size=size, shuffle=False, verbose=0),
    )
