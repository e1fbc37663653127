"""What the servers' optimizers know, on its way to and from the model of the chief.

Part of it are the moving averages of an optimizer with ``use_ema``: of the servers' weights, which
are those that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.errors import ModelError
from hvdtrain.keras.optimizer_patch import plain_optimizers
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.optimizer_state import put_averages, put_states, take_states
from hvdtrain.parameter_server.shard_optimizer import plain_optimizer
from hvdtrain.parameter_server.sharding import Shard

__all__ = ["ServerOptimizerState", "check_averages"]


class ServerOptimizerState:
    """The state of all servers, in the model's optimizer and in buffers that travel.

    Args:
        model_optimizer: Built.
        optimizer: The one whose state servers have: the same or, with elastic averaging, another
            on the same variables.
        shards: Of the servers.
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
        """What the servers begin with: a flat buffer for each."""
        if self.has_averages and self.optimizer is not self._model_optimizer:
            own = plain_optimizer(self._model_optimizer)
            _copy(own._model_variables_moving_average, self._averages)
            # The first average of all is the weights themselves.
            self.optimizer.iterations.assign(own.iterations)
        return take_states(self.optimizer, self.shards)

    def room(self) -> list[np.ndarray]:
        """Where it can come to."""
        return [np.empty_like(state) for state in take_states(self.optimizer, self.shards)]

    def put(self, states: Sequence[np.ndarray]) -> None:
        """Take over what came."""
        put_states(self.optimizer, self.shards, states)
        self._show_averages()

    def newest_weights(self, client: Client) -> list[np.ndarray]:
        """The servers' weights, after their averages have been taken over."""
        states = self.room()
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


def check_averages(optimizer: Any, *, elastic: bool) -> None:
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
