"""Errors of ``distribute`` that name missing private API of Keras."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.errors import ModelError
from hvdtrain.private_api import keras as private_keras
from hvdtrain.private_api import keras_data
from hvdtrain.private_api.keras import HOOKS

NAMES = [(kind, name) for kind, names in HOOKS.items() for name in names]


@pytest.mark.parametrize(
    ("kind", "name"), NAMES, ids=lambda value: getattr(value, "__name__", value)
)
@pytest.mark.ranks(1)
def test_a_missing_attribute_of_a_class_is_named(world, monkeypatch, kind: type, name: str) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for owner in [base for base in kind.__mro__ if name in vars(base)]:
        monkeypatch.delattr(owner, name)
    with pytest.raises(ModelError) as caught:
        hvdtrain.distribute(model)
    assert f"Keras {keras.version()} lacks {kind.__name__}.{name}, which" in str(caught.value)


@pytest.mark.ranks(1)
def test_a_missing_attribute_of_an_optimizer_is_named(world) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    del model.optimizer._learning_rate
    with pytest.raises(ModelError, match=r"lacks SGD\._learning_rate, which"):
        hvdtrain.distribute(model)


@pytest.mark.ranks(1)
def test_missing_moving_averages_are_named(world) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    del model.optimizer._model_variables_moving_average
    with pytest.raises(ModelError, match=r"lacks SGD\._model_variables_moving_average, which"):
        hvdtrain.distribute(model)


@pytest.mark.parametrize(
    ("read", "name", "holder"),
    [
        (private_keras.own_trainable_variables, "_trainable_variables", {}),
        (private_keras.own_non_trainable_variables, "_non_trainable_variables", {}),
        (private_keras.flat_losses, "_flat_losses", {"_compile_loss": SimpleNamespace()}),
        (private_keras.nested_metrics, "_metrics", {}),
        (private_keras.seed_generators_of, "_seed_generators", {}),
        (private_keras.reduction_axes, "_reduction_axes", {}),
        (private_keras.moving_averages, "_model_variables_moving_average", {}),
        (lambda iterator: private_keras.set_steps_seen(iterator, 1), "_steps_seen", {}),
        (
            private_keras.accumulated_gradients,
            "_accumulated_gradients",
            {"built": True, "gradient_accumulation_steps": 2},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_attribute_of_an_object_is_named(read, name: str, holder: dict) -> None:
    with pytest.raises(ModelError, match=rf"lacks SimpleNamespace\.{name}, which"):
        read(SimpleNamespace(**holder))


@pytest.mark.parametrize(
    ("attributes", "name"), [({}, "_inputs"), ({"_inputs": np.zeros(2)}, "_num_samples")]
)
def test_a_missing_attribute_of_the_array_adapter_is_named(
    monkeypatch, attributes: dict, name: str
) -> None:
    adapter = SimpleNamespace(**attributes)
    monkeypatch.setattr(keras_data, "ArrayDataAdapter", lambda *args, **options: adapter)
    with pytest.raises(ModelError, match=rf"lacks SimpleNamespace\.{name}, which"):
        keras_data.pack_arrays(np.zeros(2), None, None, None)


def test_the_installed_keras_is_a_tested_version() -> None:
    major, minor = map(int, keras.version().split(".")[:2])
    oldest, newest = (tuple(map(int, version.split("."))) for version in private_keras.KERAS.tested)
    assert oldest <= (major, minor) <= newest
