"""A model on its servers: its variables in shards, and what the servers' optimizers know.

What they know goes to the model of the chief and back. Part of it are the moving averages of an
optimizer with ``use_ema``: of the servers' weights, which are those that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.cluster.roles import Roles
from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.keras.optimizer_patch import plain_optimizers, remove_mixins
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.optimizer_state import AVERAGES, pack_states, unpack_states
from hvdtrain.parameter_server.published_weights import SharedMemory, share_memory
from hvdtrain.parameter_server.shard_optimizer import (
    check_optimizer,
    plain_optimizer,
    unsplittable_variables,
)
from hvdtrain.parameter_server.sharding import Shard, Spec, shard_variables, specs_of
from hvdtrain.private_api.keras import moving_averages, own_trainable_variables

__all__ = ["ServerOptimizerState", "ServerShards", "shard_model"]


@dataclass(frozen=True, kw_only=True)
class ServerShards:
    """The shards of a model, the servers that hold them, their memory and optimizer state."""

    roles: Roles
    specs: Sequence[Spec]
    shards: Sequence[Shard]
    memory: SharedMemory
    state: ServerOptimizerState


def shard_model(
    model: keras.Model, collectives: Engine, roles: Roles, settings: Settings
) -> ServerShards:
    """Cut the variables of a compiled and built model for the servers; collective.

    Raises:
        ModelError: Servers can't hold this model, or not with its optimizer.
        ConfigurationError: There are more servers than can be given something.
    """
    servers = roles.servers
    remove_mixins(model.optimizer)  # what can be cut goes by its class
    optimizer = model.optimizer
    _check_moving_averages(optimizer)
    check_optimizer(optimizer, len(servers))
    variables = model.trainable_variables
    specs = specs_of(variables)
    shards = shard_variables(specs, len(servers), unsplittable_variables(optimizer, variables))
    return ServerShards(
        roles=roles,
        specs=specs,
        shards=shards,
        memory=share_memory(collectives, servers, shards),
        state=ServerOptimizerState(optimizer, shards),
    )


class ServerOptimizerState:
    """The state of all servers, in the model's optimizer and in buffers that travel.

    Args:
        optimizer: The model's, built.
        shards: The shard of each server.
    """

    def __init__(self, optimizer: Any, shards: Sequence[Shard]) -> None:
        self.optimizer = optimizer
        self._shards = shards
        self.has_averages = any(leaf.use_ema for leaf in plain_optimizers(optimizer))
        """Whether there are moving averages of the weights."""

    def take(self) -> list[np.ndarray]:
        """Return the initial state of the servers, a flat buffer for each."""
        return pack_states(self.optimizer, self._shards)

    def buffers(self) -> list[np.ndarray]:
        """Return empty buffers for the state of all servers."""
        return [np.empty_like(state) for state in pack_states(self.optimizer, self._shards)]

    def put(self, states: Sequence[np.ndarray], *, only: str | None = None) -> None:
        """Load the state that the servers sent; ``only`` as in ``unpack_states``."""
        unpack_states(self.optimizer, self._shards, states, only=only)

    def newest_weights(self, client: Client) -> list[np.ndarray]:
        """Load the servers' averages, and return their weights."""
        states = self.buffers()
        weights = client.state(states)
        self.put(states, only=AVERAGES)
        return weights

    def finalize(self) -> None:
        """Give the model the averages if it has any, as Keras does at the end of ``fit``."""
        if not self.has_averages:
            return
        plain = plain_optimizer(self.optimizer)
        for average, variable in zip(moving_averages(plain), own_trainable_variables(plain)):
            if average is not None:
                variable.assign(average)


def _check_moving_averages(optimizer: Any) -> None:
    """Raise ModelError unless servers can keep the moving averages of the model's optimizer."""
    leaves = plain_optimizers(optimizer)
    averaging = [leaf for leaf in leaves if leaf.use_ema]
    if averaging and len(leaves) > 1:
        raise ModelError(
            "Parameter servers keep one average of all weights; received use_ema=True in one of "
            f"{len(leaves)} optimizers. Compile the model with one optimizer, or leave use_ema out."
        )
    steps = averaging[0].gradient_accumulation_steps if averaging else None
    if steps:
        raise ModelError(
            "Keras moves the averages of weights (use_ema=True) also in steps that only "
            f"accumulate gradients, of which parameter servers know nothing; received "
            f"gradient_accumulation_steps={steps}. Leave one of the two out, or --mode."
        )
