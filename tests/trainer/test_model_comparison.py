"""Differences between the ranks' models that are errors, and differences that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain.errors import MismatchError
from hvdtrain.trainer.model_sync import describe_model
from tests.trainer.features import classifier


def of_layers(*layers: Any) -> keras.Model:
    return compiled(keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)]))


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def branches(first: int) -> keras.Model:
    """Return a model of two layers of the same size, in either order."""
    inputs = keras.Input((6,))
    layers = [keras.layers.Dense(6), keras.layers.Dense(6)]
    one, two = layers[0](inputs), layers[1](inputs)
    return compiled(keras.Model(inputs, keras.layers.Subtract()([one, two][:: 1 - 2 * first])))


class WithoutConfig(keras.layers.Layer):
    """A layer that Keras can't serialize."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = functions

    def call(self, x: Any) -> Any:
        return self.functions[0](x)


def regularized(factor: float) -> Any:
    return keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(factor))


def smoothed(factor: int) -> Any:
    return keras.losses.BinaryCrossentropy(label_smoothing=0.1 * factor)


DIFFERENT: dict[str, tuple[Callable[[int], keras.Model], str]] = {
    "regularizer": (lambda n: of_layers(regularized(0.5 * n)), "kernel_regularizer config l2"),
    "dropout": (lambda n: of_layers(keras.layers.Dropout(0.1 + 0.1 * n)), "rate"),
    "activation": (lambda n: of_layers(keras.layers.Dense(3, ["relu", "tanh"][n])), "activation"),
    "class": (lambda n: of_layers([keras.layers.ReLU, keras.layers.Softmax][n]()), "layer"),
    "compute-dtype": (
        lambda n: of_layers(keras.layers.Dense(3, dtype=["float32", "mixed_bfloat16"][n])),
        "dtype",
    ),
    "connections": (branches, "inputs of its layer 3"),
    "loss": (lambda n: compiled(of_layers(), loss=smoothed(n)), "label_smoothing"),
    "loss-weights": (lambda n: compiled(of_layers(), loss_weights=[1.0 + n]), "loss_weights"),
    "units": (lambda n: of_layers(keras.layers.Dense(3 + n, name="head")), "head/kernel"),
    "learning-rate": (
        lambda n: classifier(optimizer=keras.optimizers.SGD(0.1 + n)),
        "optimizer learning_rate",
    ),
    "optimizer": (
        lambda n: classifier(optimizer=[keras.optimizers.SGD, keras.optimizers.Lion][n](0.1)),
        "optimizer",
    ),
    "steps": (lambda n: classifier(steps_per_execution=1 + n), "steps_per_execution"),
    "constant": (
        lambda n: of_layers(
            keras.layers.Dense(3, bias_initializer=keras.initializers.Constant([n, 1, 2]))
        ),
        "bias_initializer config value",
    ),
}


@pytest.mark.parametrize(("build", "name"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_models(build: Callable[[int], keras.Model], name: str) -> None:
    one, two = describe_model(build(0)), describe_model(build(1))
    assert [key for key in {**one, **two} if one.get(key) != two.get(key) and name in key]
    assert describe_model(build(0)) == one


def scheduled(loss_scaling: int) -> keras.Model:
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.9))
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return classifier(optimizer=optimizer)


EQUAL: dict[str, Callable[[int], keras.Model]] = {
    "numbered-names": lambda n: branches(1),
    "seeds": lambda n: of_layers(keras.layers.Dropout(0.1, seed=n)),
    "seeds-of-initializers": lambda n: of_layers(
        keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=n))
    ),
    "lambda": lambda n: of_layers(keras.layers.Lambda(lambda x: x + 1)),
    "nested": lambda n: of_layers(branches(0)),
    "without-configuration": lambda n: of_layers(WithoutConfig(lambda x: x, print)),
    "lambda-as-loss": lambda n: compiled(of_layers(), loss=lambda y, p: (y - p) ** 2),
    "many-constants": lambda n: of_layers(
        keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(np.ones((6, 3))))
    ),
    "numbered-optimizers": lambda n: scheduled(0),
    "numbered-loss-scale-optimizers": lambda n: scheduled(1),
}


@pytest.mark.parametrize("build", EQUAL.values(), ids=EQUAL)
def test_equal_models(build: Callable[[int], keras.Model]) -> None:
    one = describe_model(build(0))
    keras.layers.Dense(1)  # increments the counter in layer names
    keras.optimizers.SGD()
    assert describe_model(build(1)) == one


@pytest.mark.ranks(2, 3)
def test_the_error_names_what_differs_on_which_rank(world: Any) -> None:
    model = of_layers(regularized(0.25 * (world.rank() == 1)))
    expected = r"kernel_regularizer config l2: 0\.0 on rank 0, 0\.25 on rank 1"
    with pytest.raises(MismatchError, match=expected):
        world.distribute(model)
    world.distribute(classifier())
