"""Horovod's collectives on tensors, with gradients.

The collectives run eagerly, in a tf.function and in sessions, but XLA can't compile them. All ranks
must make the same calls in the same order. If the name, shape, dtype or options of a call differ
between ranks, every rank raises an error. If only some ranks make a call, these ranks raise an
error after ``HVDTRAIN_TIMEOUT_S`` seconds.

Gradients are scaled as in Horovod. ``allreduce`` and ``alltoall`` return the gradient of the sum of
all ranks' losses. ``allgather`` and ``broadcast`` return the gradient of the mean of these losses.
``reducescatter`` returns the gradient of the sum, multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.kernels import ReduceOp as EngineOp
from hvdtrain.compat.horovod.compression import Compression, Compressor
from hvdtrain.compat.horovod.exchange import ExchangeOptions, exchange
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, Sum, choose_op
from hvdtrain.frameworks.tensorflow import differentiable_ops
from hvdtrain.frameworks.tensorflow.differentiable_ops import any_rows, differentiable
from hvdtrain.frameworks.tensorflow.tensors import Arrays, operation_label, run_on_host
from hvdtrain.frameworks.variable_names import member_name
from hvdtrain.gradients.array_reduction import scale
from hvdtrain.gradients.mode import check_mode

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce the tensors of all ranks elementwise.

    Args:
        tensor: A tensor or variable with the same shape and dtype on all ranks, or
            ``tf.IndexedSlices``. The rows of ``tf.IndexedSlices`` from all ranks are concatenated
            instead of reduced.
        average: Deprecated. Use ``op`` instead. True means Average and False means Sum.
        device_dense: Device on which tensors are reduced.
        device_sparse: Device on which ``tf.IndexedSlices`` are combined.
        compression: Data type in which the tensor is sent, such as ``Compression.fp16``.
        op: Average, Sum, Adasum, Min, Max or Product. Defaults to Average. Averages of integers are
            rounded towards zero.
        prescale_factor: Factor applied before the reduction.
        postscale_factor: Factor applied after the reduction.
        name: Name for error messages, which must be the same on all ranks.
        process_set: Participating ranks. Defaults to all ranks.
        ignore_name_scope: Ignored.

    Raises:
        MismatchError: If shapes, types, names or options differ between ranks.
        NotImplementedError: If ``tensor`` is ``tf.IndexedSlices``, and ``op`` is neither Sum nor
            Average. If ``tensor`` is ``tf.IndexedSlices``, and one of the factors is not 1. If
            ``op`` is Adasum, and ``tensor`` does not contain floating-point numbers. If ``op`` is
            Adasum, and the number of ranks is not a power of two.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        name=name,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors in one collective.

    The other arguments are the same as for ``allreduce``.
    """
    options = ExchangeOptions(
        op=choose_op(op, average).tensor_op,
        compression=compression,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    return exchange(tensors, options, process_set, name)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first axis, in rank order.

    Args:
        tensor: Tensor with at least one axis. Only the size of the first axis may differ between
            ranks.
        name: Name for error messages, which must be the same on all ranks.
        ignore_name_scope: Ignored.
        process_set: Participating ranks. Defaults to all ranks.

    Raises:
        MismatchError: If dtypes, or sizes of axes other than the first, differ between ranks.
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
    """Call ``allgather`` on each of several tensors."""
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
    """Return the tensor of ``root_rank`` on every rank.

    Args:
        tensor: Tensor of the same shape and type on all ranks.
        root_rank: Rank whose tensor is returned.
        name: Name for error messages, which must be the same on all ranks.
        ignore_name_scope: Ignored.
        process_set: Participating ranks. Defaults to all ranks.

    Raises:
        MismatchError: If shapes, types or roots differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = operation_label("broadcast", name, [tensor])
    root = process_set.group_rank(int(root_rank))

    def forward(array: np.ndarray) -> np.ndarray:
        return process_set.collectives().broadcast(array, root, name=label)

    def backward(upstream: np.ndarray) -> np.ndarray:
        collectives = process_set.collectives()
        mean = collectives.allreduce(upstream, "average", name=f"gradient of {label}")
        return mean if collectives.rank == root else np.zeros_like(mean)

    return differentiable(forward, backward, tensor, tensor.shape)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Assign the values of ``root_rank`` to the variables of every rank, and return the values."""
    values = []
    for n, variable in enumerate(variables):
        value = broadcast(variable, root_rank, member_name(name, n), process_set=process_set)
        values.append(tf.convert_to_tensor(variable.assign(value)))
    return values


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank, and return the received rows in rank order.

    Args:
        tensor: Tensor that is split along its first axis. The other axes must have the same size on
            all ranks.
        splits: Number of rows for each rank, in rank order. By default, every rank gets the same
            number of rows.
        name: Name for error messages, which must be the same on all ranks.
        ignore_name_scope: Ignored.
        process_set: Participating ranks. Defaults to all ranks.

    Returns:
        The received rows. If ``splits`` is given, the result is a pair: the received rows, and an
        int32 tensor with the number of rows from each rank.

    Raises:
        ConfigurationError: If the numbers in ``splits`` do not add up to the number of rows.
        MismatchError: If dtypes, or sizes of axes other than the first, differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = operation_label("alltoall", name, [tensor])
    send_counts = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits)
    types = [tensor.dtype, tf.int32]

    def on_host(array: np.ndarray, counts: np.ndarray) -> Arrays:
        row_counts = [int(count) for count in counts] if counts.size else None
        rows, received = process_set.collectives().alltoall(array, row_counts, name=label)
        return [rows, np.array(received, np.int32)]

    @tf.custom_gradient
    def exchanged(value: tf.Tensor, counts: tf.Tensor) -> Any:
        rows, received = run_on_host(on_host, [value, counts], [any_rows(value), [None]], types)

        def backward(upstream: tf.Tensor, _: Any) -> tuple[tf.Tensor, None]:
            upstream = tf.cast(upstream, value.dtype)  # a classic graph may pass another type
            shapes = [value.shape, [None]]
            return run_on_host(on_host, [upstream, received], shapes, types)[0], None

        return (rows, received), backward

    rows, received = exchanged(tensor, send_counts)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce the tensors of all ranks and return this rank's share of the rows.

    If the rows can't be divided evenly, the first ranks get one more row. ``op`` must be Average or
    Sum. The other arguments are the same as for ``allreduce``.

    Raises:
        MismatchError: If shapes or types differ between ranks.
        NotImplementedError: If ``op`` is neither Average nor Sum.
    """
    op = choose_op(op)
    if op not in (Average, Sum):
        raise NotImplementedError(f"op of reducescatter must be Sum or Average, got {op.name}.")
    tensor = tf.convert_to_tensor(tensor)
    label = operation_label("reducescatter", name, [tensor])

    def forward(array: np.ndarray) -> np.ndarray:
        collectives = process_set.collectives()
        # The engine averages floating types only.
        integer_average = op is Average and array.dtype.kind in "iu"
        engine_op: EngineOp = "sum" if integer_average or op is Sum else "average"
        factor = postscale_factor / collectives.size if integer_average else postscale_factor
        scaled = scale(array, float(prescale_factor))
        return scale(collectives.reduce_scatter(scaled, engine_op, name=label), float(factor))

    def backward(upstream: np.ndarray) -> np.ndarray:
        collectives = process_set.collectives()
        factor = prescale_factor * postscale_factor * (collectives.size if op is Sum else 1)
        return collectives.allgather(scale(upstream, float(factor)), name=f"gradient of {label}")

    with tf.device(device_dense or None):
        packed, context = compression.compress(tensor)
        scattered = differentiable(forward, backward, packed, any_rows(packed))
        return compression.decompress(scattered, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Call ``reducescatter`` on each of several tensors."""
    return [
        reducescatter(
            tensor,
            device_dense,
            compression,
            op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for tensor in tensors
    ]


def join() -> tf.Tensor:
    """Wait until all ranks have called ``join``.

    A rank calls this when it has no more data. The other ranks may still call ``allreduce``, and
    run steps with a ``DistributedGradientTape`` or ``DistributedOptimizer``. A rank that has joined
    contributes zeros to sums and averages. It contributes nothing to Min, Max and Product. Averages
    still divide by the number of all ranks, including those that have joined.

    Returns:
        The rank that joined last, as an int32 tensor. If several ranks joined last at the same
        time, the result is the highest of these ranks.

    Raises:
        ConfigurationError: If the job is elastic.
        MismatchError: If another rank made a different call.
        ModelError: If some ranks are parameter servers.
    """
    check_mode("tensorflow.join", gradients=False)
    return run_on_host(
        lambda: [np.array(world.collectives().join(), np.int32)], [], [[]], [tf.int32]
    )[0]
