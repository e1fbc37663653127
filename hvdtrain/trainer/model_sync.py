"""Functions that keep the model equal on all ranks.

The ranks' models are compared at first. Then the chief's values are copied to all ranks. After an
epoch, the values are compared again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import MismatchError, ModelError
from hvdtrain.frameworks.variable_names import renumbered
from hvdtrain.private_api.keras import flatten_layers, without_loading_tensorflow
from hvdtrain.trainer.model_parts import (
    attributes_of_type,
    optimizer_variables,
    optimizers_of,
    plain_optimizers_of,
    tensorflow_variables,
    unique,
)
from hvdtrain.trainer.optimizer_patch import accumulator_variables
from hvdtrain.trainer.rank_random import seed_generators
from hvdtrain.trainer.variables import array_of, assign

__all__ = [
    "broadcast_model",
    "broadcast_weights",
    "check_equal",
    "check_same_model",
    "describe_model",
]

# Keras converts constants, such as pretrained embeddings, to lists of Python numbers.
_MAX_CONSTANTS = 1 << 20
_GRAPH = ("input_layers", "output_layers")


def broadcast_model(model: keras.Model, collectives: Engine, more: Sequence[Any] = ()) -> None:
    """Copy the chief's weights, optimizer state and metrics to all ranks.

    The variables ``more`` are copied too. Random seeds and accumulated gradients are not copied,
    because they belong to each rank's own samples.
    """
    own = {id(v) for leaf in plain_optimizers_of(model) for v in accumulator_variables(leaf)}
    state = [variable for variable in optimizer_variables(model) if id(variable) not in own]
    broadcast_weights(model, collectives, [*state, *model.metrics_variables, *more])


def broadcast_weights(model: keras.Model, collectives: Engine, more: Sequence[Any] = ()) -> None:
    """Copy the chief's weights, and the variables ``more``, to all ranks.

    Random seeds are not copied. Variables that are already equal on all ranks are not sent. This is
    the case after an earlier ``fit``, for example.
    """
    if collectives.size == 1:
        return
    seeds = {id(generator.state) for generator in seed_generators(model)}
    candidates = [*model.variables, *tensorflow_variables(model), *more]
    variables = unique(v for v in candidates if id(v) not in seeds)
    if not variables:
        return
    digests = np.stack([np.frombuffer(_digest(variable), np.uint8) for variable in variables])
    chiefs = collectives.broadcast(digests, name="digests of variables")
    # If the chief is lost here, equal variables are equal to the next chief's as well.
    differs = (digests != chiefs).any(axis=1)
    differs = collectives.allreduce(differs, "max", name="variables that differ")
    for index in np.flatnonzero(differs):
        variable = variables[index]
        value = array_of(variable)
        # Named by index, because names of variables include counters of the process.
        assign(variable, collectives.broadcast(value, name=f"variable {index}"))


def check_equal(model: keras.Model, variables: Sequence[Any], collectives: Engine) -> None:
    """Check that variables are bitwise equal on all ranks. All ranks must call this.

    Raises:
        ModelError: If a variable differs. All ranks raise this error, which names the first
            variable that differs.
    """
    digests = [_digest(variable).hex() for variable in variables]
    all_ranks = collectives.allgather_object(digests, name="weights after an epoch")
    for variable, of_ranks in zip(variables, zip(*all_ranks)):
        if len(set(of_ranks)) > 1:
            raise ModelError(
                f"{variable.path} of the model {model.name!r} differs between ranks after an "
                "epoch, because train_step has changed it with gradients that were not averaged. "
                "Apply gradients with optimizers that are attributes of the model, or of models "
                "and layers in it, or average them with hvdtrain.DistributedGradientTape."
            )


def _digest(variable: Any) -> bytes:
    """Return a hash of the bits of a variable. Hashing runs at about 1.4 GB/s on one core."""
    return hashlib.sha256(array_of(variable).tobytes()).digest()


def check_same_model(model: keras.Model, collectives: Engine) -> None:
    """Check that models and optimizers are equal on all ranks. All ranks must call this.

    Raises:
        MismatchError: If models or optimizers differ. All ranks raise this error, which names the
            first differences.
    """
    with without_loading_tensorflow():
        own = describe_model(model)
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    if len(set(collectives.allgather_object(digest, name="model"))) == 1:
        return
    all_ranks = collectives.allgather_object(own, name="what differs between models")
    for rank, other in enumerate(all_ranks):
        if other == all_ranks[0]:
            continue
        differences = [
            f"{key}: {_shorten(all_ranks[0].get(key, 'absent'))} on rank 0, "
            f"{_shorten(other.get(key, 'absent'))} on rank {rank}"
            for key in {**all_ranks[0], **other}
            if all_ranks[0].get(key) != other.get(key)
        ]
        raise MismatchError(
            "All ranks must build the same model and optimizer, but they differ. "
            + "; ".join(differences[:5])
            + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
            + ". Look for choices in the script that depend on the rank or on the host."
        )


def describe_model(model: keras.Model) -> dict[str, str]:
    """Return what must be equal on all ranks: variables, layers, optimizers and losses.

    Names and seeds are left out, because they may differ between ranks. A layer, optimizer or loss
    without a Keras configuration is described by its type.
    """
    trainable = renumbered([variable.path for variable in model.trainable_variables])
    described = {"trainable order": "|".join(trainable)}
    paths = renumbered([variable.path for variable in model.variables])
    for index, (path, variable) in enumerate(zip(paths, model.variables)):
        described[f"variable {path} ({index})"] = f"{variable.dtype} {variable.shape}"
    described |= _describe_layers(model)
    optimizers = optimizers_of(model)
    for number, optimizer in enumerate(optimizers, 1):
        name = "optimizer" if number == 1 else f"optimizer {number}"
        described[name] = type(optimizer).__name__
        # A single optimizer is built by now, except on parameter servers, which need no state.
        # Several optimizers are built when they are first applied. Some ranks may have done that.
        described[f"{name} is built"] = str(optimizer.built or len(optimizers) == 1)
        described |= _flatten(name, optimizer.get_config())
    described |= _flatten("loss", _config_of(model.loss, keras.saving.serialize_keras_object))
    compiled = _config_of(model, lambda compiled: compiled.get_compile_config())
    if isinstance(compiled, Mapping):
        for key in ("loss_weights", "metrics", "weighted_metrics"):
            described |= _flatten(key, compiled.get(key))
    described["steps_per_execution"] = str(model.steps_per_execution)
    described["run_eagerly"] = str(model.run_eagerly)
    return described


def _describe_layers(model: keras.Model) -> dict[str, str]:
    """Describe each layer by its configuration, and each model by the connections of its layers."""
    layers = flatten_layers(model)
    names = renumbered([layer.name for layer in layers])
    labels = {layer.name: name for layer, name in zip(layers, names)}
    constants = [
        np.size(constant.value)
        for layer in layers
        for constant in attributes_of_type(layer, keras.initializers.Constant)
    ]
    is_small = sum(constants) <= _MAX_CONSTANTS
    described = {}
    for index, (layer, name) in enumerate(zip(layers, names)):
        label = f"layer {name} ({index})"
        described[label] = type(layer).__name__
        if not is_small:
            continue
        config = _config_of(layer, lambda layer: layer.get_config())
        if isinstance(config, Mapping) and isinstance(config.get("layers"), list):
            # The layers of this model have their own entries.
            parts = [entry for entry in config["layers"] if isinstance(entry, Mapping)]
            graph: dict[str, Any] = {key: config.get(key) for key in _GRAPH}
            for number, entry in enumerate(parts):
                graph[f"inputs of its layer {number}"] = entry.get("inbound_nodes")
            config = {key: config[key] for key in config.keys() - {"layers", *_GRAPH}}
            config |= keras.tree.map_structure(
                lambda leaf: labels.get(leaf, leaf) if isinstance(leaf, str) else leaf, graph
            )
        described |= _flatten(label, config)
    return described


def _config_of(value: Any, read: Any) -> Any:
    """Return the Keras configuration of an object, or the name of its type if this fails."""
    try:
        with warnings.catch_warnings():
            # Keras warns that lambdas can't be loaded, but nothing is saved here.
            warnings.simplefilter("ignore")
            return read(value)
    except Exception:
        return _to_json(value)


def _flatten(name: str, config: Any) -> dict[str, str]:
    """Flatten a nested configuration: ``loss``, ``{"a": {"b": 1}}`` -> ``{"loss a b": "1"}``."""
    config = _to_json(config)
    if not isinstance(config, dict):
        return {name: json.dumps(config)}
    entries: dict[str, str] = {}
    for key in sorted(config):
        entries |= _flatten(f"{name} {key}", config[key])
    return entries


def _to_json(value: Any) -> Any:
    """Convert a value for JSON, without names, seeds and memory addresses."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":
            return "a lambda"
        if str(value.get("class_name")).endswith("DTypePolicy"):
            return json.dumps(value.get("config"), default=str)  # identified by its name
        names = ("name", "shared_object_id")
        keys = [key for key in value if key not in names and not str(key).endswith("seed")]
        return {str(key): _to_json(value[key]) for key in keys}
    if isinstance(value, (list, tuple)):
        return [_to_json(entry) for entry in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_to_json(entry)) for entry in value)
    return str(getattr(value, "__name__", type(value).__name__))


def _shorten(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]} …"
