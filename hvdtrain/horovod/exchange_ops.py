"""Horovod's collectives that move tensors, with gradients; in tf.functions and eagerly, not in XLA.

All ranks call them in the same order: nothing negotiates. What differs in name, shape or type is
an error on every rank; what only some ranks call is one after ``HVDTRAIN_TIMEOUT_S``.

Their gradients are those that Horovod gives: of the mean of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.tensorflow import differentiable_ops
from hvdtrain.tensorflow.differentiable_ops import any_rows
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host
from hvdtrain.tensorflow.variable_names import member_name, operation_label

__all__ = ["allgather", "alltoall", "broadcast", "broadcast_", "grouped_allgather"]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Put the tensors of all ranks one after the other, along the first axis, in rank order.

    Args:
        tensor: At least one axis; the others of one size on all ranks, the first of any.
        name: For errors; the same on all ranks.
        ignore_name_scope: Has no effect: names here have no scopes.
        process_set: The ranks that take part; all of them if not given.

    Raises:
        MismatchError: Types, or sizes but the first, differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = operation_label("allgather", name, [tensor])
    return differentiable_ops.allgather(process_set.collectives, tensor, label)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Do ``allgather`` with each of several tensors, one after the other."""
    return [
        allgather(tensor, member_name(name, n), process_set=process_set)
        for n, tensor in enumerate(tensors)
    ]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the tensor of ``root_rank``.

    Args:
        tensor: One shape and type on all ranks.
        root_rank: Whose it is.
        name, ignore_name_scope, process_set: As for ``allgather``.

    Raises:
        MismatchError: Shapes, types or roots differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = operation_label("broadcast", name, [tensor])
    root = process_set.place_of(int(root_rank))

    def give(array: np.ndarray) -> np.ndarray:
        return process_set.collectives().broadcast(array, root, name=label)

    def collect(array: np.ndarray) -> np.ndarray:
        collectives = process_set.collectives()
        mean = collectives.allreduce(array, "average", name=f"gradient of {label}")
        return mean if collectives.rank == root else np.zeros_like(mean)

    return differentiable_ops.differentiable(give, collect, tensor, tensor.shape)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Give the variables of every rank the values of ``root_rank``; returns the values."""
    values = []
    for n, variable in enumerate(variables):
        given = broadcast(variable, root_rank, member_name(name, n), process_set=process_set)
        values.append(tf.convert_to_tensor(variable.assign(given)))
    return values


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows to each rank, and take what they send.

    Args:
        tensor: Its first axis is cut; the others have one size on all ranks.
        splits: How many rows go to each rank, in rank order; None for as many to each.
        name, ignore_name_scope, process_set: As for ``allgather``.

    Returns:
        What came, in rank order; with ``splits`` also how many rows came from each rank, int32.

    Raises:
        ConfigurationError: ``splits`` don't add up to the rows that there are.
        MismatchError: Types, or sizes but the first, differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = operation_label("alltoall", name, [tensor])
    wanted = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits)

    def exchange(array: np.ndarray, counts: np.ndarray) -> Arrays:
        chosen = [int(count) for count in counts] if counts.size else None
        came, received = process_set.collectives().alltoall(array, chosen, name=label)
        return [came, np.array(received, np.int32)]

    @tf.custom_gradient
    def exchanged(value: tf.Tensor, counts: tf.Tensor) -> Any:
        types = [value.dtype, tf.int32]
        came, received = run_on_host(exchange, [value, counts], [any_rows(value), [None]], types)

        def backward(upstream: tf.Tensor, _: Any) -> tuple[tf.Tensor, None]:
            # In a classic graph, what comes may have another type.
            sent = tf.cast(upstream, value.dtype)
            return run_on_host(exchange, [sent, received], [value.shape, [None]], types)[0], None

        return (came, received), backward

    came, received = exchanged(tensor, wanted)
    return came if splits is None else (came, received)
