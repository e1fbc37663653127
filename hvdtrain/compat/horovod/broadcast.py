"""Horovod's functions that broadcast and gather variables and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod.collective_ops import broadcast
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.tensorflow.tf_errors import raise_as_in_tensorflow
from hvdtrain.frameworks.variable_names import variable_label
from hvdtrain.gradients.mode import check_mode

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Assign the values of ``root_rank`` to the variables of every rank.

    Args:
        variables: Variables in the same order on every rank.
        root_rank: Rank whose values are assigned.
        process_set: Participating ranks. Defaults to all ranks.
        inplace: Ignored.

    Returns:
        In a graph, the operation that assigns the values. In eager execution, None.

    Raises:
        MismatchError: If shapes or types differ between ranks.
        ModelError: If some ranks are parameter servers.
    """
    check_mode("tensorflow.broadcast_variables", gradients=False)
    assigned = []
    for variable in variables:
        value = broadcast(variable, root_rank, variable_label(variable), process_set=process_set)
        assigned.append(variable.assign(value))
    return None if tf.executing_eagerly() else tf.group(assigned)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of ``root_rank`` on every rank.

    The object is sent as a pickle, so use this only if you trust all ranks.

    Args:
        obj: Any object that can be pickled. Only the object of ``root_rank`` is used.
        root_rank: Rank whose object is returned.
        session: Ignored.
        name: Name for error messages, which must be the same on all ranks.
        process_set: Participating ranks. Defaults to all ranks.
    """
    with raise_as_in_tensorflow():
        return process_set.collectives().broadcast_object(
            obj, process_set.group_rank(root_rank), name=name or "object", codec="pickle"
        )


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that calls ``broadcast_object``.

    The function takes the object. The other arguments of ``broadcast_object`` are fixed here.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks in rank order.

    The other arguments are the same as for ``broadcast_object``.
    """
    with raise_as_in_tensorflow():
        collectives = process_set.collectives()
        return collectives.allgather_object(obj, name=name or "object", codec="pickle")


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that copies the values of ``root_rank``'s global variables to all ranks.

    Raises:
        ModelError: If execution is eager, because TensorFlow then has no list of global variables.
    """
    if tf.executing_eagerly():
        raise ModelError(
            "broadcast_global_variables requires a TensorFlow 1 graph: eager TensorFlow does not "
            "list variables. Use broadcast_variables(model.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Session hook that broadcasts the global variables when the session is created.

    At that time, each rank has initialized its variables or restored them from a checkpoint. Only
    ``root_rank`` needs access to the checkpoint.

    Args:
        root_rank: Rank whose values are assigned on every rank.
        device: Device that runs the broadcast operations.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self._root_rank = root_rank
        self._device = device
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Add the operation that broadcasts the variables to the graph."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device or None):
                self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self._broadcast)
