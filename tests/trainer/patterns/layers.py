"""Examples from the guides on layers, models, losses and data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import hvdtrain
from tests.trainer.features import JOINT_BATCH, X, Y, classifier
from tests.trainer.patterns.pattern import (
    LOSS,
    NOISE,
    TOKENS,
    WEIGHTS,
    Hits,
    Pattern,
    fit,
    stack,
    validated,
)

layers = keras.layers


class Watching(layers.Layer):
    """Adds a loss and a metric that are computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        self.size.update_state(keras.ops.mean(keras.ops.abs(x), axis=-1))
        return x


def two_outputs() -> keras.Model:
    first, second = keras.Input((6,), name="first"), keras.Input((2,), name="second")
    shared = layers.Dense(4, "tanh")
    joined = layers.concatenate([shared(first), shared(keras.ops.flip(first, 1)), second])
    outputs = {
        "label": layers.Dense(3, name="label")(joined),
        "value": layers.Dense(1, name="value")(joined),
    }
    model = keras.Model({"first": first, "second": second}, outputs)
    model.compile(
        keras.optimizers.RMSprop(0.01),
        loss={"label": LOSS, "value": "mse"},
        loss_weights={"label": 1.0, "value": 0.2},
        metrics={"label": ["accuracy"], "value": ["mae"]},
    )
    return model


def _train_two(model: keras.Model, size: int) -> Any:
    inputs = {"first": X, "second": NOISE}
    history = fit(inputs, {"label": Y, "value": X[:, :1]})(model, size)
    # Keras weights the short last batch as a full one in the losses of single outputs.
    return {name: history[name] for name in ("loss", "label_accuracy", "value_mae")}


def _sums() -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return stack(layers.Dense(3, kernel_regularizer="l2"), loss=loss, metrics=["accuracy"])


def _means() -> keras.Model:
    reduction = "mean_with_sample_weight"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    return stack(layers.Dense(3, kernel_regularizer="l2"), loss=loss)


def _tagger() -> keras.Model:
    parts = [layers.Embedding(7, 4, mask_zero=True), layers.Dense(3)]
    return stack(*parts, start=keras.Input((5,), dtype="int32"), metrics=["accuracy"])


def _frozen() -> keras.Model:
    """A new head on a frozen base, on TensorFlow with BatchNormalization."""
    base = keras.Sequential([keras.Input((6,)), layers.Dense(4, use_bias=False)])
    if keras.backend.backend() == "tensorflow":  # otherwise Keras refuses to synchronize it
        base.add(layers.BatchNormalization(synchronized=True))
    base.trainable = False
    start = keras.Input((6,))
    model = keras.Model(start, layers.Dense(3)(base(start, training=False)))
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    return model


def _fine_tune(model: keras.Model, size: int) -> Any:
    """Train the head, then the whole model at a lower rate."""
    before = fit(epochs=1)(model, size)
    model.layers[1].trainable = True
    model.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
    if size < JOINT_BATCH:
        hvdtrain.distribute(model)
    after = fit(epochs=1)(model, size)
    return {name: [*values, *after[name]] for name, values in before.items()}


def _encoder_decoder() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(7, 3, mask_zero=True)(tokens)
    _, state_ = layers.GRU(3, return_state=True)(embedded)
    out = layers.Bidirectional(layers.LSTM(2))(embedded)
    model = keras.Model(tokens, layers.Dense(3)(layers.concatenate([state_, out])))
    model.compile(keras.optimizers.Adam(0.01), LOSS)
    return model


class Endpoint(layers.Layer):
    """Adds the loss and a metric of targets and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, targets: Any, logits: Any) -> Any:
        self.add_loss(LOSS(targets, logits))
        self.accuracy.update_state(targets, logits)
        return keras.ops.softmax(logits)


def _endpoint() -> keras.Model:
    inputs, targets = keras.Input((6,), name="inputs"), keras.Input((1,), name="targets")
    outputs = Endpoint()(targets, layers.Dense(3)(inputs))
    model = keras.Model({"inputs": inputs, "targets": targets}, outputs)
    model.compile(keras.optimizers.Adam(0.01))
    return model


def squares(y_true: Any, y_pred: Any) -> Any:
    """Return the loss of each row."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Residual(keras.Model):
    """A model that calls its blocks in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(6, "tanh") for _ in range(3)]
        self.normalize = layers.LayerNormalization()
        self.head = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.normalize(x))


def _unbuilt() -> keras.Model:
    model = Residual()
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    return model


def _preprocessed() -> keras.Model:
    """Preprocessing layers, one of them adapted to the data."""
    normalization = layers.Normalization()
    normalization.adapt(X)
    return stack(normalization, layers.Rescaling(0.5), layers.Dense(3))


def _lists() -> keras.Model:
    """A list of two outputs, one without a loss."""
    start = keras.Input((6,))
    model = keras.Model(start, [layers.Dense(2, name="unused")(start), layers.Dense(3)(start)])
    model.compile(keras.optimizers.RMSprop(0.01), loss=[None, LOSS])
    return model


# On JAX, layers can't update metrics.
_WITH_METRICS_OF_LAYERS = ("tensorflow", "torch")

LAYERS: dict[str, Pattern] = {
    "losses and metrics of layers": Pattern(
        lambda: stack(layers.Dense(4), Watching(), layers.Dense(3)),
        fit(**validated),
        backends=_WITH_METRICS_OF_LAYERS,
    ),
    "targets as an input, an endpoint with the loss": Pattern(
        _endpoint,
        fit({"inputs": X, "targets": Y[:, np.newaxis]}, None),
        backends=_WITH_METRICS_OF_LAYERS,
    ),
    "losses that are sums": Pattern(_sums, fit(**validated), often=True),
    "losses that are means by sample weights": Pattern(
        _means, fit(X, Y, WEIGHTS, validation_data=(X[:17], Y[:17], WEIGHTS[:17])), often=True
    ),
    "masked outputs of each time step": Pattern(_tagger, fit(TOKENS, TOKENS % 3)),
    "a user-defined metric": Pattern(
        # Don't validate, because Keras alone would report the value of the validation for training.
        lambda: classifier(metrics=[Hits(), "accuracy"]),
        fit(),
        eager=False,
    ),
    "a loss function": Pattern(
        lambda: stack(layers.Dense(3), loss=squares, metrics=[squares]), fit(X, X[:, :3], WEIGHTS)
    ),
    "several inputs and outputs, a shared layer": Pattern(two_outputs, _train_two, often=True),
    "an output without a loss": Pattern(_lists, fit(X, [None, Y])),
    "a model that is never called before fit": Pattern(_unbuilt, fit()),
    "preprocessing layers": Pattern(_preprocessed, fit()),
    "frozen, then fine-tuned": Pattern(_frozen, _fine_tune),
    "recurrent layers with masks and states": Pattern(_encoder_decoder, fit(TOKENS, Y)),
}
