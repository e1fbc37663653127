"""The parts of a model beside Keras' own: steps, optimizers, what its layers hold.

A model has one optimizer as a rule, several where a ``train_step`` of its own applies them. Keras
knows of ``model.optimizer`` alone. A GAN holds one for each of its networks as an attribute, builds
them when they are first applied, and leaves ``model.optimizer`` unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.keras.optimizer_patch import plain_optimizers
from hvdtrain.private_api.keras import (
    flatten_layers,
    own_non_trainable_variables,
    own_trainable_variables,
)

__all__ = [
    "attributes_of_type",
    "build_optimizers",
    "built_variable_indices",
    "check_can_be_averaged",
    "has_own_call",
    "layer_statistics",
    "optimizer_variables",
    "optimizers_of",
    "overrides",
    "plain_optimizers_of",
    "recurrent_states",
    "refuse_strategy",
    "tensorflow_variables",
]


Kind = TypeVar("Kind")


def refuse_strategy(model: keras.Model) -> None:
    """Refuse a model made under a strategy of ``tf.distribute``.

    Raises:
        ModelError: The model has a strategy.
    """
    strategy = model.distribute_strategy
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        raise ModelError(
            f"The model {model.name!r} belongs to tf.distribute, got a {type(strategy).__name__}; "
            "make and distribute it outside of the strategy's scope, as hvdtrain starts a process "
            "per GPU (hvdtrain run -np N), or --towers N in one process."
        )


def overrides(model: keras.Model, step: str) -> bool:
    """Whether the model's class defines this step itself: ``train_step`` or another."""
    return getattr(type(model), step) is not getattr(keras.Model, step)


def has_own_call(model: keras.Model) -> bool:
    """Whether the model computes something itself, rather than only holding others that do."""
    return type(model).call is not keras.Model.call


def attributes_of_type(layer: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The objects of a kind among a layer's attributes, those of its own layers aside."""
    return _within(vars(layer), kind, set())


def _within(value: Any, kind: type[Kind], seen: set[int]) -> Iterator[Kind]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _within(entry, kind, seen)


def optimizers_of(model: keras.Model) -> list[Any]:
    """List the optimizers that may update the model, ``model.optimizer`` first if there is one.

    Where the model has a ``train_step`` of its own: all that are attributes of the model, or of
    models and layers in it, also in lists and dicts.
    """
    found = [] if model.optimizer is None else [model.optimizer]
    if overrides(model, "train_step"):
        for layer in flatten_layers(model):
            found += attributes_of_type(layer, keras.optimizers.Optimizer)
    inner = {id(leaf) for outer in found for leaf in plain_optimizers(outer) if leaf is not outer}
    return list({id(entry): entry for entry in found if id(entry) not in inner}.values())


def plain_optimizers_of(model: keras.Model) -> list[Any]:
    """List the optimizers within ``optimizers_of`` that update weights."""
    return [leaf for outer in optimizers_of(model) for leaf in plain_optimizers(outer)]


def optimizer_variables(model: keras.Model) -> list[Any]:
    """The variables of all optimizers."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def built_variable_indices(model: keras.Model) -> list[list[int]]:
    """Return by optimizer which of ``model.variables`` it has state for; none if not built."""
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    return [
        [
            places[id(variable)]
            for leaf in plain_optimizers(optimizer)
            if leaf.built
            for variable in own_trainable_variables(leaf)
            if id(variable) in places
        ]
        for optimizer in optimizers_of(model)
    ]


def build_optimizers(model: keras.Model, built: Sequence[Sequence[int]]) -> None:
    """Build unbuilt optimizers for the variables that ``built_variable_indices`` named."""
    for optimizer, places in zip(optimizers_of(model), built):
        if places and not optimizer.built and max(places) < len(model.variables):
            optimizer.build([model.variables[place] for place in places])


def layer_statistics(model: keras.Model) -> list[Any]:
    """The variables that layers update themselves, such as BatchNorm's moving moments.

    Frozen weights, which Keras counts as non-trainable, are none.
    """
    kept = [v for layer in flatten_layers(model) for v in own_non_trainable_variables(layer)]
    kept += tensorflow_variables(model)
    return list({id(variable): variable for variable in kept}.values())


def tensorflow_variables(model: keras.Model) -> list[tf.Variable]:
    """Numbers that layers hold as ``tf.Variable``, of which Keras knows nothing."""
    found = [v for layer in flatten_layers(model) for v in attributes_of_type(layer, tf.Variable)]
    numbers = [v for v in found if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool]
    return list({id(variable): variable for variable in numbers}.values())


def recurrent_states(model: keras.Model) -> list[Any]:
    """Return the states, no weights, that stateful recurrent layers carry from batch to batch."""
    layers = [layer for layer in flatten_layers(model) if getattr(layer, "stateful", False)]
    states = [keras.tree.flatten(getattr(layer, "states", None)) for layer in layers]
    return [state for entry in states for state in entry if isinstance(state, keras.Variable)]


def check_can_be_averaged(model: keras.Model, mode: str) -> None:
    """Check that the weights are numbers of which there is a mean, as ``mode`` asks for.

    Raises:
        ModelError: Some are not.
    """
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"{variable.path} is no weight that could be averaged: float8 keeps scales among "
                f"the variables. Use another dtype policy, or another --mode than {mode}."
            )
