"""Keeping the variables of a model alike on all ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import ModelError
from hvdtrain.keras.model_parts import (
    held_by,
    plain_optimizers_of,
    state_of_optimizers,
)
from hvdtrain.keras.optimizer_patch import accumulators
from hvdtrain.private_api.keras import (
    flatten_layers,
    own_non_trainable_variables,
    seed_generators_of,
)

__all__ = [
    "broadcast_model",
    "broadcast_weights",
    "check_alike",
    "check_can_be_averaged",
    "draw_seed",
    "layer_statistics",
    "recurrent_states",
    "reseed_by_rank",
    "seed_generators",
    "seed_of_rank",
]


def broadcast_model(model: keras.Model, collectives: Collectives, more: Sequence[Any] = ()) -> None:
    """Give all ranks the chief's weights, optimizer state and metrics, and ``more`` variables.

    Not its random seeds, nor its gradients that wait for an update: others have those of their own
    samples.
    """
    waiting = [v for leaf in plain_optimizers_of(model) for v in accumulators(leaf)]
    own = {id(variable) for variable in waiting if variable is not None}
    state = [variable for variable in state_of_optimizers(model) if id(variable) not in own]
    broadcast_weights(model, collectives, [*state, *model.metrics_variables, *more])


def broadcast_weights(
    model: keras.Model, collectives: Collectives, more: Sequence[Any] = ()
) -> None:
    """Give all ranks the chief's weights, and ``more`` variables; not its random seeds.

    What all of them have does not cross: made from one seed, or left by the last ``fit``.
    """
    if collectives.size == 1:
        return
    seeds = {id(generator.state) for generator in seed_generators(model)}
    every = [*model.variables, *_of_tensorflow(model), *more]
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


def draw_seed(collectives: Collectives) -> int:
    """A seed for the orders of data, the chief's; takes no number from Python's generator.

    A program that goes on to draw from it, as initializers do, gets what it gets on one process.
    """
    state = random.getstate()
    seed = random.getrandbits(31)
    random.setstate(state)
    return int(collectives.broadcast_object(seed, name="seed"))


def check_alike(model: keras.Model, variables: Sequence[Any], collectives: Collectives) -> None:
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


def seed_generators(model: keras.Model) -> list[Any]:
    """All random states of the model's layers."""
    found = {id(g): g for layer in flatten_layers(model) for g in seed_generators_of(layer)}
    return list(found.values())


def reseed_by_rank(model: keras.Model, collectives: Collectives) -> None:
    """Let each rank draw its own random numbers; the chief's are those of a single process.

    Otherwise all ranks would drop the same units of their different samples.
    """
    for generator in seed_generators(model):
        state = np.asarray(generator.state.numpy())
        shared = collectives.broadcast(state, name="seed")
        generator.state.assign(seed_of_rank(shared, collectives.rank))


def seed_of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """The chief's random state turned into another rank's; the chief keeps it."""
    if rank == 0:
        return state
    bits = np.random.SeedSequence([int(abs(state[0])), rank])
    limit = np.iinfo(state.dtype).max
    own = state.copy()
    own[0] = int(bits.generate_state(1, np.uint64)[0]) % limit
    return own


def layer_statistics(model: keras.Model) -> list[Any]:
    """The variables that layers update themselves, such as BatchNorm's moving moments.

    Frozen weights, which Keras counts as non-trainable, are none.
    """
    kept = [v for layer in flatten_layers(model) for v in own_non_trainable_variables(layer)]
    kept += _of_tensorflow(model)
    return list({id(variable): variable for variable in kept}.values())


def _of_tensorflow(model: keras.Model) -> list[tf.Variable]:
    """Numbers that layers hold as ``tf.Variable``, of which Keras knows nothing."""
    found = [v for layer in flatten_layers(model) for v in held_by(layer, tf.Variable)]
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
