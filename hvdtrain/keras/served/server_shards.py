"""How servers hold a model: its variables in shards, and what their optimizers know.

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
from hvdtrain.collectives.interface import Collectives
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.keras.optimizer_patch import plain_optimizers, unmix
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.optimizer_state import put_averages, put_states, take_states
from hvdtrain.parameter_server.shard_optimizer import check_optimizer, plain_optimizer, stays_whole
from hvdtrain.parameter_server.sharding import Shard, Spec, shard_variables, specs_of
from hvdtrain.parameter_server.shared_memory import SharedMemory, share_memory

__all__ = ["ServerOptimizerState", "ServerShards", "center_optimizer", "shard_model"]


@dataclass(frozen=True, kw_only=True)
class ServerShards:
    """Which server holds what.

    Attributes:
        roles: Which ranks train, and which serve.
        specs: What the trainable variables are like.
        shards: What each server holds.
        memory: What ranks of one host share.
        state: What the servers' optimizers know.
    """

    roles: Roles
    specs: Sequence[Spec]
    shards: Sequence[Shard]
    memory: SharedMemory
    state: ServerOptimizerState


def shard_model(
    model: keras.Model, collectives: Collectives, roles: Roles, settings: Settings
) -> ServerShards:
    """Cut a model's variables for the servers; collective.

    Args:
        model: Compiled and built.
        collectives: Between all ranks.
        roles: Which ranks train, and which serve.
        settings: The job's.

    Raises:
        ModelError: Servers can't hold this model, or not with its optimizer.
        ConfigurationError: There are more servers than can be given something.
    """
    servers = roles.servers
    unmix(model.optimizer)  # what can be cut goes by its class
    optimizer = model.optimizer
    elastic = settings.mode == "easgd"
    _check_averages(optimizer, elastic=elastic)
    if elastic:
        _check_elastic(model)
        optimizer = center_optimizer(model)
    check_optimizer(optimizer, len(servers))
    variables = model.trainable_variables
    specs = specs_of(variables)
    shards = shard_variables(specs, len(servers), stays_whole(optimizer, variables))
    return ServerShards(
        roles=roles,
        specs=specs,
        shards=shards,
        # What is read may be newer than the answer's, and to compensate a server must know it.
        memory=share_memory(collectives, servers, shards, readable=not settings.dc_asgd),
        state=ServerOptimizerState(model.optimizer, optimizer, shards),
    )


class ServerOptimizerState:
    """The state of all servers, in the model's optimizer and in buffers that travel.

    Args:
        model_optimizer: Built.
        optimizer: The one whose state servers have: the same or, with elastic averaging, another
            on the same variables.
        shards: What each server holds.
    """

    def __init__(self, model_optimizer: Any, optimizer: Any, shards: Sequence[Shard]) -> None:
        self._model_optimizer = model_optimizer
        self.optimizer = optimizer
        self.shards = shards

    @property
    def has_averages(self) -> bool:
        """Whether there are moving averages of the weights."""
        return any(leaf.use_ema for leaf in plain_optimizers(self._model_optimizer))

    def take(self) -> list[np.ndarray]:
        """The state that servers begin with: a flat buffer for each."""
        if self.has_averages and self.optimizer is not self._model_optimizer:
            own = plain_optimizer(self._model_optimizer)
            _copy(own._model_variables_moving_average, self._averages)
            # The first average of all is the weights themselves.
            self.optimizer.iterations.assign(own.iterations)
        return take_states(self.optimizer, self.shards)

    def buffers(self) -> list[np.ndarray]:
        """Room for the state of all servers."""
        return [np.empty_like(state) for state in take_states(self.optimizer, self.shards)]

    def put(self, states: Sequence[np.ndarray]) -> None:
        """Take over what the servers sent."""
        put_states(self.optimizer, self.shards, states)
        self._show_averages()

    def newest_weights(self, client: Client) -> list[np.ndarray]:
        """The servers' weights, after their averages have been taken over."""
        states = self.buffers()
        weights = client.state(states)
        put_averages(self.optimizer, self.shards, states)
        self._show_averages()
        return weights

    def finalize(self) -> None:
        """Give the model the averages where it has any, as Keras does at the end of ``fit``."""
        if self.has_averages:
            own = plain_optimizer(self._model_optimizer)
            _copy(own._model_variables_moving_average, own._trainable_variables)

    @property
    def _averages(self) -> Sequence[Any]:
        return plain_optimizer(self.optimizer)._model_variables_moving_average

    def _show_averages(self) -> None:
        if self.has_averages and self.optimizer is not self._model_optimizer:
            own = plain_optimizer(self._model_optimizer)
            _copy(self._averages, own._model_variables_moving_average)


def center_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """What servers move the center with; it averages it as the model's would its weights."""
    own = plain_optimizer(model.optimizer)
    optimizer = keras.optimizers.SGD(
        1.0,
        use_ema=own.use_ema,
        ema_momentum=own.ema_momentum,
        ema_overwrite_frequency=own.ema_overwrite_frequency,
    )
    optimizer.build(model.trainable_variables)
    return optimizer


def _check_elastic(model: keras.Model) -> None:
    """See that the weights can be averaged.

    Raises:
        ModelError: They can't.
    """
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"{variable.path} is no weight that could be averaged: float8 keeps scales among "
                "the variables. Use another dtype policy, or another --mode than easgd."
            )


def _check_averages(optimizer: Any, *, elastic: bool) -> None:
    """See that servers can keep the averages that ``optimizer`` asks for.

    Args:
        optimizer: The model's.
        elastic: Whether servers update their weights in another way than it would.

    Raises:
        ModelError: They can't.
    """
    leaves = plain_optimizers(optimizer)
    averaging = [leaf for leaf in leaves if leaf.use_ema]
    if averaging and len(leaves) > 1:
        raise ModelError(
            "Parameter servers keep one average of all weights; received use_ema=True in one of "
            f"{len(leaves)} optimizers. Compile the model with one optimizer, or leave use_ema out."
        )
    steps = averaging[0].gradient_accumulation_steps if averaging else None
    if steps and not elastic:
        raise ModelError(
            "Keras moves the averages of weights (use_ema=True) also in steps that only "
            f"accumulate gradients, of which parameter servers know nothing; received "
            f"gradient_accumulation_steps={steps}. Leave one of the two out, or --mode."
        )


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets):
        if source is not None and target is not None:
            target.assign(source)
