"""Keeping the variables of a model alike on all ranks."""

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
from hvdtrain.keras.model_parts import (
    attributes_of_type,
    optimizer_variables,
    optimizers_of,
    plain_optimizers_of,
    tensorflow_variables,
)
from hvdtrain.keras.optimizer_patch import accumulator_variables
from hvdtrain.keras.rank_random import seed_generators
from hvdtrain.private_api.keras import (
    flatten_layers,
)
from hvdtrain.tensorflow.variable_names import counted_anew

__all__ = [
    "broadcast_model",
    "broadcast_weights",
    "check_alike",
    "check_same_model",
    "describe_model",
]


def broadcast_model(model: keras.Model, collectives: Engine, more: Sequence[Any] = ()) -> None:
    """Give all ranks the chief's weights, optimizer state and metrics, and ``more`` variables.

    Not its random seeds, nor its gradients that wait for an update: others have those of their own
    samples.
    """
    waiting = [v for leaf in plain_optimizers_of(model) for v in accumulator_variables(leaf)]
    own = {id(variable) for variable in waiting if variable is not None}
    state = [variable for variable in optimizer_variables(model) if id(variable) not in own]
    broadcast_weights(model, collectives, [*state, *model.metrics_variables, *more])


def broadcast_weights(model: keras.Model, collectives: Engine, more: Sequence[Any] = ()) -> None:
    """Give all ranks the chief's weights, and ``more`` variables; not its random seeds.

    What all of them have does not cross: made from one seed, or left by the last ``fit``.
    """
    if collectives.size == 1:
        return
    seeds = {id(generator.state) for generator in seed_generators(model)}
    every = [*model.variables, *tensorflow_variables(model), *more]
    variables = list({id(v): v for v in every if id(v) not in seeds}.values())
    if not variables:
        return
    digests = np.stack([np.frombuffer(_digest(variable), np.uint8) for variable in variables])
    chiefs = collectives.broadcast(digests, name="digests of variables")
    # If the chief is lost here, what does not differ is what the next one has, too.
    others = (digests != chiefs).any(axis=1)
    differ = collectives.allreduce(others, "max", name="variables that differ")
    for index in np.flatnonzero(differ):
        variable = variables[index]
        value = np.asarray(variable.numpy())
        # By index: Keras numbers names by what the process has made before, on this rank alone.
        variable.assign(collectives.broadcast(value, name=f"variable {index}"))


def check_alike(model: keras.Model, variables: Sequence[Any], collectives: Engine) -> None:
    """Check that variables are the same on all ranks, to the bit; collective.

    Raises:
        ModelError: On every rank, where they are not; names the first that differs.
    """
    digests = [_digest(variable).hex() for variable in variables]
    everyone = collectives.allgather_object(digests, name="weights after an epoch")
    for variable, seen in zip(variables, zip(*everyone)):
        if len(set(seen)) > 1:
            raise ModelError(
                f"{variable.path} of the model {model.name!r} differs between ranks after an "
                "epoch: train_step has changed it by gradients that were not averaged. Let it "
                "apply gradients with optimizers that are attributes of the model, or of models "
                "and layers in it, or average them with hvdtrain.DistributedGradientTape."
            )


def _digest(variable: Any) -> bytes:
    """Of all bits of its value; a gigabyte takes about 0.7 s of a core."""
    return hashlib.sha256(np.asarray(variable.numpy()).tobytes()).digest()


# Keras turns larger constants, such as pretrained embeddings, into lists of Python numbers.
_MOST_CONSTANTS = 1 << 20


# Arguments of compile() that are described by their configuration.
_COMPILED = ("loss_weights", "metrics", "weighted_metrics")


_GRAPH = ("input_layers", "output_layers")


_LONGEST_TEXT = 120


def check_same_model(model: keras.Model, collectives: Engine) -> None:
    """Compare models and optimizers between ranks; collective.

    Raises:
        MismatchError: On every rank; names the first variables or settings that differ.
    """
    mine = describe_model(model)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(collectives.allgather_object(digest, name="model"))) == 1:
        return
    everyone = collectives.allgather_object(mine, name="what differs between models")
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        differences = [
            f"{key}: {_shorten(everyone[0].get(key, 'absent'))} on rank 0, "
            f"{_shorten(theirs.get(key, 'absent'))} on rank {rank}"
            for key in {**everyone[0], **theirs}
            if everyone[0].get(key) != theirs.get(key)
        ]
        raise MismatchError(
            "All ranks must build the same model and optimizer, but they differ. "
            + "; ".join(differences[:5])
            + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
            + ". Look for choices in the script that depend on the rank or on the host."
        )


def describe_model(model: keras.Model) -> dict[str, str]:
    """Describe the parts that must be equal on all ranks: variables, layers, optimizers, losses.

    Names and seeds are left out, because they may differ between ranks. A part without a
    configuration is described by its type.
    """
    trainable = counted_anew([variable.path for variable in model.trainable_variables])
    described = {"trainable order": "|".join(trainable)}
    paths = counted_anew([variable.path for variable in model.variables])
    for index, (path, variable) in enumerate(zip(paths, model.variables)):
        described[f"variable {path} ({index})"] = f"{variable.dtype} {variable.shape}"
    described |= _describe_layers(model)
    optimizers = optimizers_of(model)
    for number, optimizer in enumerate(optimizers, 1):
        name = "optimizer" if number == 1 else f"optimizer {number}"
        described[name] = type(optimizer).__name__
        # Built when they are first applied, on some rank perhaps before. One alone is built by now,
        # but for parameter servers, which need no state for themselves.
        described[f"{name} is built"] = str(optimizer.built or len(optimizers) == 1)
        described |= _flatten(name, optimizer.get_config())
    described |= _flatten("loss", _config_of(model.loss, keras.saving.serialize_keras_object))
    compiled = _config_of(model, lambda compiled: compiled.get_compile_config())
    if isinstance(compiled, Mapping):
        for key in _COMPILED:
            described |= _flatten(key, compiled.get(key))
    described["steps_per_execution"] = str(model.steps_per_execution)
    described["run_eagerly"] = str(model.run_eagerly)
    return described


def _describe_layers(model: keras.Model) -> dict[str, str]:
    """Describe each layer by its configuration, and models by how their layers are connected."""
    layers = flatten_layers(model)
    names = counted_anew([layer.name for layer in layers])
    labels = {layer.name: name for layer, name in zip(layers, names)}
    constants = [np.size(c.value) for layer in layers for c in attributes_of_type(layer, _Constant)]
    is_small = sum(constants) <= _MOST_CONSTANTS
    described = {}
    for index, (layer, name) in enumerate(zip(layers, names)):
        label = f"layer {name} ({index})"
        described[label] = type(layer).__name__
        if not is_small:
            continue
        config = _config_of(layer, lambda layer: layer.get_config())
        if isinstance(config, Mapping) and isinstance(config.get("layers"), list):
            # Its layers have entries of their own.
            parts = [entry for entry in config["layers"] if isinstance(entry, Mapping)]
            graph: dict[str, Any] = {key: config.get(key) for key in _GRAPH}
            for number, entry in enumerate(parts):
                graph[f"inputs of its layer {number}"] = entry.get("inbound_nodes")
            config = {key: config[key] for key in config.keys() - {"layers", *_GRAPH}}
            config |= _renamed(graph, labels)
        described |= _flatten(label, config)
    return described


_Constant = keras.initializers.Constant


def _config_of(thing: Any, read: Any) -> Any:
    """Return a configuration; the name of the type if there is none."""
    try:
        with warnings.catch_warnings():
            # Keras warns of lambdas, which can't be loaded; nothing is saved here.
            warnings.simplefilter("ignore")
            return read(thing)
    except Exception:
        return _plain(thing)


def _flatten(name: str, config: Any) -> dict[str, str]:
    """Return the entries of a configuration, each under the names that lead to it."""
    config = _plain(config)
    if not isinstance(config, dict):
        return {name: json.dumps(config)}
    entries: dict[str, str] = {}
    for key in sorted(config):
        entries |= _flatten(f"{name} {key}", config[key])
    return entries


def _plain(value: Any) -> Any:
    """Return a value for JSON, without names, seeds and memory addresses."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":
            return "a lambda"
        if str(value.get("class_name")).endswith("DTypePolicy"):
            return json.dumps(value.get("config"), default=str)  # its name says what it is
        keys = [key for key in value if not _may_differ(str(key))]
        return {str(key): _plain(value[key]) for key in keys}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(entry)) for entry in value)
    return str(getattr(value, "__name__", type(value).__name__))


def _may_differ(key: str) -> bool:
    return key in ("name", "shared_object_id") or key.endswith("seed")


def _renamed(value: Any, labels: Mapping[str, str]) -> Any:
    """Return the part of a configuration that names layers, with labels in place of the names."""
    if isinstance(value, Mapping):
        return {key: _renamed(entry, labels) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(entry, labels) for entry in value]
    return labels.get(value, value) if isinstance(value, str) else value


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …"
