"""Models for ``hvdtrain bench``, and synthetic data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

__all__ = ["build_model", "synthetic_data"]

SEED = 7
CLASSES = 10


def build_model(name: str) -> keras.Model:
    """Return a compiled model, always with the same weights.

    Args:
        name: ``small``, ``lenet``, ``mlp``, ``transformer`` or ``resnet50``.
    """
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([*_BODIES[name](), layers.Dense(CLASSES)])
    model.compile(
        optimizer=keras.optimizers.SGD(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def synthetic_data(model: keras.Model, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs and labels, the same on every rank."""
    random = np.random.default_rng(SEED)
    inputs = random.random((rows, *model.input_shape[1:]), dtype=np.float32)
    return inputs, random.integers(0, CLASSES, rows).astype(np.int32)


def _lenet() -> list[Any]:
    """Return the layers of TensorFlow's MNIST tutorials: 1.7 million parameters."""
    return [
        keras.Input((28, 28, 1)),
        layers.Conv2D(32, 5, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 5, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(512, activation="relu"),
    ]


def _mlp() -> list[Any]:
    """Return two wide layers: 20 million parameters, with little computation per parameter."""
    wide = [layers.Dense(4096, activation="relu") for _ in range(2)]
    return [keras.Input((784,)), *wide]


def _small() -> list[Any]:
    """Return a tiny network."""
    return [keras.Input((32,)), layers.Dense(64, activation="relu")]


def _resnet50() -> list[Any]:
    """Return Keras' ResNet-50 for small images: 24 million parameters in many variables."""
    shape = (64, 64, 3)
    body = keras.applications.ResNet50(
        include_top=False, weights=None, input_shape=shape, pooling="avg"
    )
    return [keras.Input(shape), body]


def _transformer() -> list[Any]:
    """Return an encoder of 32 tokens: 10 million parameters, half a million in an embedding."""
    start = x = keras.Input((32, 512))
    for _ in range(3):
        normal = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(8, 64)(normal, normal)
        normal = layers.LayerNormalization()(x)
        x += layers.Dense(512)(layers.Dense(2048, activation="gelu")(normal))
    body = keras.Model(start, layers.GlobalAveragePooling1D()(x))
    tokens = [layers.Rescaling(1000.0), layers.Embedding(1000, 512)]
    return [keras.Input((32,)), *tokens, body]


_BODIES: dict[str, Callable[[], list[Any]]] = {
    "lenet": _lenet,
    "mlp": _mlp,
    "resnet50": _resnet50,
    "small": _small,
    "transformer": _transformer,
}
