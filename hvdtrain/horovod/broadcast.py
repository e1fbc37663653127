"""Variables and Python objects between ranks, under Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.tape import check_mode
from hvdtrain.horovod.exchange_ops import broadcast
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.tensorflow.tf_errors import raise_as_in_tensorflow
from hvdtrain.tensorflow.variable_names import variable_label

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
    """Give every rank the values that ``root_rank`` has; in a tf.function or a graph, too.

    Args:
        variables: The same on every rank.
        root_rank: Whose values they get.
        process_set: The ranks that take part; all of them if not given.
        inplace: Has no effect.

    Returns:
        In a graph what does it, for a session to run; None where it is done.

    Raises:
        MismatchError: Shapes or types differ between ranks.
        ModelError: Some ranks are parameter servers.
    """
    check_mode("tensorflow.broadcast_variables", gradients=False)
    assigned = []
    for variable in variables:
        name = variable_label(variable)
        given = broadcast(variable, root_rank, name, process_set=process_set)
        assigned.append(variable.assign(given))
    return None if tf.executing_eagerly() else tf.group(assigned)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank an object of ``root_rank``; it travels by pickle.

    Args:
        obj: Anything that pickle takes; looked at on ``root_rank`` alone.
        root_rank: Whose object it is.
        session: None: there are no sessions in TensorFlow 2.
        name: For errors; the same on all ranks.
        process_set: The ranks that take part; all of them if not given.
    """
    with raise_as_in_tensorflow():
        return process_set.collectives().broadcast_object(
            obj, process_set.place_of(root_rank), name=name or "object", codec="pickle"
        )


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function of an object that calls ``broadcast_object`` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of all ranks, in rank order; they travel by pickle. See ``broadcast_object``."""
    with raise_as_in_tensorflow():
        collectives = process_set.collectives()
        return collectives.allgather_object(obj, name=name or "object", codec="pickle")


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
