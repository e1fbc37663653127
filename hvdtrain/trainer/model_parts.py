"""The parts of a model that Keras doesn't list: optimizers, layer statistics, overridden methods.

For example, a GAN has an optimizer for each of its networks as an attribute, and leaves
``model.optimizer`` unused. Keras builds such an optimizer when the optimizer is first applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import keras

from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import (
    flatten_layers,
    own_non_trainable_variables,
    own_trainable_variables,
)
from hvdtrain.trainer.optimizer_patch import plain_optimizers

__all__ = [
    "attributes_of_type",
    "build_optimizers",
    "built_variable_indices",
    "check_can_be_averaged",
    "layer_statistics",
    "optimizer_variables",
    "optimizers_of",
    "overrides",
    "plain_optimizers_of",
    "recurrent_states",
    "tensorflow_variables",
    "unique",
]

Kind = TypeVar("Kind")


def unique(entries: Iterable[Kind]) -> list[Kind]:
    """Return the distinct objects, in order of their first appearance."""
    return list({id(entry): entry for entry in entries}.values())


def overrides(model: keras.Model, method: str) -> bool:
    """Return whether the model's class overrides a method of ``keras.Model``."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def attributes_of_type(layer: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the attributes of a layer that have the given type.

    If an attribute is a list or a dict, its entries are included. Attributes of sublayers are not
    included.
    """
    return _find(vars(layer), kind, set())


def _find(value: Any, kind: type[Kind], seen: set[int]) -> Iterator[Kind]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _find(entry, kind, seen)


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers that may update the model.

    If ``model.optimizer`` is set, it is the first one. If the model overrides ``train_step``, the
    result also contains optimizers that are attributes of the model, or attributes of models and
    layers inside it.
    """
    optimizers = [] if model.optimizer is None else [model.optimizer]
    if overrides(model, "train_step"):
        for layer in flatten_layers(model):
            optimizers += attributes_of_type(layer, keras.optimizers.Optimizer)
    inner = {
        id(leaf) for outer in optimizers for leaf in plain_optimizers(outer) if leaf is not outer
    }
    return unique(entry for entry in optimizers if id(entry) not in inner)


def plain_optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers that update the model's weights.

    For a ``LossScaleOptimizer`` or a ``MultiOptimizer``, the result contains the optimizers inside
    it.
    """
    return [leaf for outer in optimizers_of(model) for leaf in plain_optimizers(outer)]


def optimizer_variables(model: keras.Model) -> list[Any]:
    """Return the variables of all optimizers."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def built_variable_indices(model: keras.Model) -> list[list[int]]:
    """Return, for each optimizer, the indices in ``model.variables`` that it was built for."""
    indices = {id(variable): index for index, variable in enumerate(model.variables)}
    return [
        [
            indices[id(variable)]
            for leaf in plain_optimizers(optimizer)
            if leaf.built
            for variable in own_trainable_variables(leaf)
            if id(variable) in indices
        ]
        for optimizer in optimizers_of(model)
    ]


def build_optimizers(model: keras.Model, indices: Sequence[Sequence[int]]) -> None:
    """Build the optimizers that are not built yet.

    Each is built for the variables with the indices that ``built_variable_indices`` returned
    before.
    """
    for optimizer, own in zip(optimizers_of(model), indices):
        if own and not optimizer.built and max(own) < len(model.variables):
            optimizer.build([model.variables[index] for index in own])


def layer_statistics(model: keras.Model) -> list[Any]:
    """Return the variables that layers update themselves, such as moving means.

    Frozen weights are not included, although Keras calls both kinds non-trainable variables.
    Variables of optimizers are not included either. On JAX, a model with several optimizers keeps
    them in its own attributes.
    """
    layers = flatten_layers(model)
    own = [variable for layer in layers for variable in own_non_trainable_variables(layer)]
    of_optimizers = set(map(id, optimizer_variables(model)))
    return unique(v for v in [*own, *tensorflow_variables(model)] if id(v) not in of_optimizers)


def tensorflow_variables(model: keras.Model) -> list[Any]:
    """Return numeric ``tf.Variable``s of layers that Keras doesn't track, on TensorFlow."""
    if keras.backend.backend() != "tensorflow":
        return []
    import tensorflow as tf

    layers = flatten_layers(model)
    variables = [v for layer in layers for v in attributes_of_type(layer, tf.Variable)]
    return unique(
        v for v in variables if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool
    )


def recurrent_states(model: keras.Model) -> list[Any]:
    """Return the states that stateful recurrent layers carry from batch to batch."""
    layers = [layer for layer in flatten_layers(model) if getattr(layer, "stateful", False)]
    states = [keras.tree.flatten(getattr(layer, "states", None)) for layer in layers]
    return [state for entry in states for state in entry if isinstance(state, keras.Variable)]


def check_can_be_averaged(model: keras.Model, mode: str) -> None:
    """Check that ranks can average the weights of this model, as ``mode`` requires.

    Raises:
        ModelError: If a variable holds float8 scales.
    """
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"{variable.path} holds scales of float8 values, which can't be averaged; use a "
                f"different dtype policy, or a different --mode from {mode}."
            )
