"""Horovod's collectives that exchange PyTorch tensors, such as ``allgather``, with gradients.

All ranks must make the same calls in the same order. Gradients are scaled as in Horovod.
``alltoall`` returns the gradient of the sum of all ranks' losses. ``allgather`` and ``broadcast``
return the gradient of the mean of these losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain import world
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.torch.call_queue import calls
from hvdtrain.compat.horovod.torch.operations import (
    Handle,
    all_of,
    differentiable,
    in_place,
    synchronize,
    waiting,
)
from hvdtrain.compat.horovod.torch.reductions import allreduce_async
from hvdtrain.frameworks.torch.tensors import array_of, tensor_of

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "join",
]

Tensors = Sequence[torch.Tensor]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to concatenate the tensors of all ranks along the first axis, in rank order.

    Args:
        tensor: Tensor with at least one axis. Only the size of the first axis may differ between
            ranks.
        name: Name for error messages, which must be the same on all ranks.
        process_set: Participating ranks. Defaults to all ranks.
    """
    array = array_of(tensor)
    return Handle(
        lambda: process_set.collectives().allgather(array, name=name or ""),
        lambda result: tensor_of(result, tensor),
    )


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first axis, in rank order.

    The arguments are the same as in ``allgather_async``.

    Raises:
        MismatchError: If dtypes, or sizes of axes other than the first, differ between ranks.
    """

    def forward(value: torch.Tensor) -> list[torch.Tensor]:
        return [synchronize(allgather_async(value, name, process_set))]

    def backward(upstream: torch.Tensor) -> list[torch.Tensor]:
        array, label = array_of(upstream), f"gradient of {name or 'allgather'}"

        def own_rows() -> np.ndarray:
            engine = process_set.collectives()
            mean = engine.allreduce(array, "average", name=label)
            counts = engine.allgather(np.array([tensor.shape[0]]), name=label)
            start = int(counts[: engine.rank].sum())
            return mean[start : start + tensor.shape[0]]

        return [tensor_of(calls.run(own_rows), upstream)]

    return differentiable(forward, backward, [tensor])[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``allgather`` for each of several tensors."""
    return all_of([allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Call ``allgather`` on each of several tensors."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send the tensor of ``root_rank`` to every rank.

    Args:
        tensor: Tensor of the same shape and type on all ranks.
        root_rank: Rank whose tensor is returned.
        name: Name for error messages, which must be the same on all ranks.
        process_set: Participating ranks. Defaults to all ranks.
    """
    array, root = array_of(tensor), process_set.group_rank(int(root_rank))
    return Handle(
        lambda: process_set.collectives().broadcast(array, root, name=name or ""),
        lambda result: tensor_of(result, tensor),
    )


broadcast_async_ = in_place(
    broadcast_async, "Start to copy the tensor of ``root_rank`` to the tensors of all ranks."
)
broadcast_ = waiting(
    broadcast_async_, "Copy the tensor of ``root_rank`` to the tensors of all ranks."
)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of ``root_rank`` on every rank.

    The arguments are the same as in ``broadcast_async``.

    Raises:
        MismatchError: If shapes, types or roots differ between ranks.
    """

    def forward(value: torch.Tensor) -> list[torch.Tensor]:
        return [synchronize(broadcast_async(value, root_rank, name, process_set))]

    def backward(upstream: torch.Tensor) -> list[torch.Tensor]:
        label = f"gradient of {name or 'broadcast'}"
        mean = synchronize(allreduce_async(upstream, name=label, process_set=process_set))
        is_root = process_set.collectives().rank == process_set.group_rank(root_rank)
        return [mean if is_root else torch.zeros_like(mean)]

    return differentiable(forward, backward, [tensor])[0]


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send rows to each rank.

    ``synchronize`` returns a pair: the received rows in rank order, and an int32 tensor with the
    number of rows from each rank.

    Args:
        tensor: Tensor that is split along its first axis. The other axes must have the same size on
            all ranks.
        splits: Number of rows for each rank, in rank order. By default, every rank gets the same
            number of rows.
        name: Name for error messages, which must be the same on all ranks.
        process_set: Participating ranks. Defaults to all ranks.

    Raises:
        ValueError: If ``splits`` contains something other than integers.
    """
    counts = None
    if splits is not None:
        numbers = torch.as_tensor(splits)
        if numbers.is_floating_point():
            raise ValueError(f"splits must be integers, got {numbers.dtype}.")
        counts = [int(count) for count in numbers.reshape(-1)]
    array = array_of(tensor)

    def finish(result: tuple[np.ndarray, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.tensor(result[1], dtype=torch.int32)
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return tensor_of(result[0], tensor), received.to(device)

    return Handle(
        lambda: process_set.collectives().alltoall(array, counts, name=name or ""), finish
    )


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank. The arguments are the same as in ``alltoall_async``.

    Returns:
        The received rows. If ``splits`` is given, the result is a pair: the received rows, and an
        int32 tensor with the number of rows from each rank.

    Raises:
        ConfigurationError: If the numbers in ``splits`` do not add up to the number of rows.
        MismatchError: If dtypes, or sizes of axes other than the first, differ between ranks.
    """
    received: list[torch.Tensor] = []

    def forward(value: torch.Tensor) -> list[torch.Tensor]:
        rows, counts = synchronize(alltoall_async(value, splits, name, process_set))
        received.append(counts)
        return [rows]

    def backward(upstream: torch.Tensor) -> list[torch.Tensor]:
        label = f"gradient of {name or 'alltoall'}"
        return [synchronize(alltoall_async(upstream, received[0], label, process_set))[0]]

    (rows,) = differentiable(forward, backward, [tensor])
    return rows if splits is None else (rows, received[0])


def join(device: int = -1) -> int:
    """Wait until all ranks have called ``join``. Return the rank that called it last.

    A rank calls this when it has no more data. The other ranks may still call ``allreduce``, and
    call ``step`` of a ``DistributedOptimizer``. A rank that has joined contributes zeros to sums
    and averages. It contributes nothing to Min, Max and Product. Averages still divide by the
    number of all ranks, including those that have joined.

    Args:
        device: Ignored.

    Raises:
        ConfigurationError: If the job is elastic.
        MismatchError: If another rank made a different call.
    """
    return calls.run(lambda: world.collectives().join())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called ``barrier``."""
    calls.run(lambda: process_set.collectives().barrier())
