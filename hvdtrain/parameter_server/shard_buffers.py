"""What a server holds, as the buffers in which it travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.parameter_server.gradient_packing import Parts
from hvdtrain.parameter_server.optimizer_state import AVERAGES, cut_state, gather_state
from hvdtrain.parameter_server.sharded_optimizers import plain_optimizer
from hvdtrain.parameter_server.sharding import Shard
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["ShardBuffers", "put_averages", "put_states", "take_states"]


class ShardBuffers:
    """A table behind the buffers of a ``Server``.

    Args:
        optimizer: The model's.
        shard: What is held.
        variables: All trainable variables of the model.
    """

    def __init__(self, optimizer: Any, shard: Shard, variables: Sequence[Any]) -> None:
        self._table = VariableTable(optimizer, shard, variables)
        self.paths: Sequence[str] = [variables[piece.variable].path for piece in shard.pieces]
        self.state_bytes = join_bytes(self._table.state()).size

    def learning_rate(self) -> float:
        """Of the next update."""
        return self._table.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        """From the next update on."""
        if self._table.learning_rate != np.float32(rate):
            self._table.learning_rate = rate

    def weights(self, buffer: np.ndarray) -> None:
        """Copy the weights to a flat buffer."""
        self._table.weights(buffer)

    def load(self, weights: np.ndarray, state: np.ndarray) -> None:
        """Take weights and the optimizer's state from flat buffers."""
        self._table.load(weights)
        self._table.load_state(split_bytes(state, self._table.state()))

    def state(self) -> np.ndarray:
        """The optimizer's state as a flat buffer."""
        return join_bytes(self._table.state())

    def apply(self, gradients: Parts, learning_rate_factor: float = 1.0) -> None:
        """Update the weights."""
        self._table.apply(
            gradients.flat, learning_rate_factor, rows=gradients.rows, missing=gradients.missing
        )


def take_states(optimizer: Any, shards: Sequence[Shard]) -> list[np.ndarray]:
    """The state of a whole model's optimizer as the flat buffers of all shards."""
    return [join_bytes(cut_state(optimizer, shard)) for shard in shards]


def put_states(optimizer: Any, shards: Sequence[Shard], states: Sequence[np.ndarray]) -> None:
    """Give a whole model's optimizer the state that all shards have.

    A learning rate that can be set stays: servers have what this rank told them last.
    """
    rate = plain_optimizer(optimizer)._learning_rate
    before = rate.numpy() if isinstance(rate, keras.Variable) else None
    gather_state(optimizer, shards, _parts(optimizer, shards, states))
    if before is not None:
        rate.assign(before)


def put_averages(optimizer: Any, shards: Sequence[Shard], states: Sequence[np.ndarray]) -> None:
    """Give it no more of that than the moving averages of the weights."""
    gather_state(optimizer, shards, _parts(optimizer, shards, states), only=AVERAGES)


def _parts(
    optimizer: Any, shards: Sequence[Shard], states: Sequence[np.ndarray]
) -> list[dict[str, np.ndarray]]:
    return [split_bytes(state, cut_state(optimizer, shard)) for shard, state in zip(shards, states)]
