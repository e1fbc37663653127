"""The start of ranks that train in sessions of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.horovod.broadcast import broadcast_variables

__all__ = ["BroadcastGlobalVariablesHook", "broadcast_global_variables"]


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """An operation that gives every rank the global variables that ``root_rank`` has.

    Args:
        root_rank: Whose values they get.

    Raises:
        ModelError: There is no graph: eagerly TensorFlow keeps no list of variables.
    """
    if tf.executing_eagerly():
        raise ModelError(
            "broadcast_global_variables is for graphs of TensorFlow 1; eagerly there is no list of "
            "all variables. Use broadcast_variables(model.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank the global variables of ``root_rank`` when the session begins.

    They have been initialized then, or restored from a checkpoint where there is one: one that
    ``root_rank`` alone has is enough.

    Args:
        root_rank: Whose values all get.
        device: Where they are put together.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self._root_rank = root_rank
        self._device = device
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Add the operation to the graph that is complete now."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device or None):
                self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._broadcast)
