"""Horovod's collectives on tensors, with gradients; in a tf.function and eagerly, not in XLA.

All ranks call them in the same order: nothing negotiates. What differs in name, shape or type is
an error on every rank; what only some ranks call is one after ``HVDTRAIN_TIMEOUT_S``.

Their gradients are those that Horovod gives: of ``allreduce``, that of the sum of all ranks'
losses; of ``allgather`` and ``broadcast``, that of the mean of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.tape import check_averages
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reduce_ops import (
    Adasum,
    Average,
    Min,
    Product,
    ReduceOp,
    Sum,
    choose_op,
    reduce_all,
    scale,
)
from hvdtrain.tensorflow.device_collectives import DeviceCollectives
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host
from hvdtrain.tensorflow.variable_names import without_counts

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
    """Combine the tensors of all ranks element by element.

    Args:
        tensor: A tensor or variable, of one shape and type on all ranks; or ``tf.IndexedSlices``,
            whose rows are put one after the other.
        average: The older way to ask for Average or Sum.
        device_dense: Where the result of a tensor is to be.
        device_sparse: Where the result of ``tf.IndexedSlices`` is to be.
        compression: The type in which it travels; one of ``Compression``.
        op: Average (the default), Sum, Adasum, Min, Max or Product. The average of whole numbers
            loses its fraction.
        prescale_factor: Multiplies what goes in.
        postscale_factor: Multiplies what comes out.
        name: For errors; the same on all ranks.
        process_set: The ranks that take part; all of them if not given.
        ignore_name_scope: Of no effect: names here have no scopes.

    Raises:
        MismatchError: Ranks passed different shapes, types, names or options.
        NotImplementedError: For ``tf.IndexedSlices`` an op other than Sum and Average, or factors;
            Adasum of whole numbers, or of a number of ranks that is no power of two.
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
    """``allreduce`` of several tensors in one go, which costs less than one after the other."""
    chosen = choose_op(op, average)
    factors = float(prescale_factor), float(postscale_factor)
    results: list[Any] = list(tensors)
    dense = [n for n, entry in enumerate(tensors) if not isinstance(entry, tf.IndexedSlices)]
    if dense:
        with tf.device(device_dense or None):
            values = [tf.convert_to_tensor(tensors[n]) for n in dense]
            packed, contexts = zip(*(compression.compress(value) for value in values))
            label = _name("allreduce", name, values)
            reduced = _reduce(packed, chosen, *factors, label, process_set)
            for n, value, context in zip(dense, reduced, contexts):
                results[n] = compression.decompress(value, context)
    for n in set(range(len(tensors))) - set(dense):
        with tf.device(device_sparse or None):
            results[n] = _allreduce_rows(tensors[n], chosen, factors, name, process_set)
    return results


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
        ignore_name_scope: Of no effect: names here have no scopes.
        process_set: The ranks that take part; all of them if not given.

    Raises:
        MismatchError: Types, or sizes but the first, differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = _name("allgather", name, [tensor])

    @tf.custom_gradient
    def gathered(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gather(array: np.ndarray) -> Arrays:
            return [process_set.collectives().allgather(array, name=label)]

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            rows = tf.shape(value, tf.int64)[0]
            return run_on_host(_own_part, [upstream, rows], [value.shape])[0]

        def _own_part(upstream: np.ndarray, rows: np.ndarray) -> Arrays:
            collectives = process_set.collectives()
            of = f"gradient of {label}"
            mean = collectives.allreduce(upstream, "average", name=of)
            counts = collectives.allgather(np.reshape(rows, 1), name=of)
            start = int(counts[: collectives.rank].sum())
            return [mean[start : start + int(rows)]]

        (result,) = run_on_host(gather, [value], [_any_rows(value)])
        return result, backward

    return gathered(tensor)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``allgather`` of each."""
    return [
        allgather(tensor, _member(name, n), process_set=process_set)
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
        name: For errors; the same on all ranks.
        ignore_name_scope: Of no effect: names here have no scopes.
        process_set: The ranks that take part; all of them if not given.

    Raises:
        MismatchError: Shapes, types or roots differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = _name("broadcast", name, [tensor])
    root = process_set.place_of(int(root_rank))

    @tf.custom_gradient
    def given(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def give(array: np.ndarray) -> Arrays:
            return [process_set.collectives().broadcast(array, root, name=label)]

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            def collect(array: np.ndarray) -> Arrays:
                collectives = process_set.collectives()
                mean = collectives.allreduce(array, "average", name=f"gradient of {label}")
                return [mean if collectives.rank == root else np.zeros_like(mean)]

            return run_on_host(collect, [upstream], [value.shape])[0]

        (result,) = run_on_host(give, [value], [value.shape])
        return result, backward

    return given(tensor)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Give the variables of every rank the values of ``root_rank``; returns the values."""
    values = []
    for n, variable in enumerate(variables):
        given = broadcast(variable, root_rank, _member(name, n), process_set=process_set)
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
        name: For errors; the same on all ranks.
        ignore_name_scope: Of no effect: names here have no scopes.
        process_set: The ranks that take part; all of them if not given.

    Returns:
        What came, in rank order; with ``splits`` also how many rows came from each rank, int32.

    Raises:
        ConfigurationError: ``splits`` don't add up to the rows that there are.
        MismatchError: Types, or sizes but the first, differ between ranks.
    """
    tensor = tf.convert_to_tensor(tensor)
    label = _name("alltoall", name, [tensor])
    wanted = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits)

    def exchange(array: np.ndarray, counts: np.ndarray) -> Arrays:
        chosen = [int(count) for count in counts] if counts.size else None
        came, received = process_set.collectives().alltoall(array, chosen, name=label)
        return [came, np.array(received, np.int32)]

    @tf.custom_gradient
    def exchanged(value: tf.Tensor, counts: tf.Tensor) -> Any:
        came, received = run_on_host(
            exchange, [value, counts], [_any_rows(value), [None]], [value.dtype, tf.int32]
        )

        def backward(upstream: tf.Tensor, _: Any) -> tuple[tf.Tensor, None]:
            shapes = [value.shape, [None]]
            types = [value.dtype, tf.int32]
            # In a classic graph, what comes may have another type.
            sent = tf.cast(upstream, value.dtype)
            return run_on_host(exchange, [sent, received], shapes, types)[0], None

        return (came, received), backward

    came, received = exchanged(tensor, wanted)
    return came if splits is None else (came, received)


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
    """Combine the tensors of all ranks, and keep this rank's share of the first axis.

    The first ranks get one row more where rows don't divide evenly.

    Args:
        tensor: One shape and type on all ranks.
        device_dense: Where the result is to be.
        compression: The type in which it travels; one of ``Compression``.
        op: Average or Sum.
        name: For errors; the same on all ranks.
        process_set: The ranks that take part; all of them if not given.
        ignore_name_scope: Of no effect: names here have no scopes.
        prescale_factor: Multiplies what goes in.
        postscale_factor: Multiplies what comes out.

    Raises:
        MismatchError: Shapes or types differ between ranks.
        NotImplementedError: Another op.
    """
    chosen = choose_op(op)
    if chosen not in (Average, Sum):
        raise NotImplementedError(
            f"reducescatter can combine by Sum and Average; received op={chosen.name}."
        )
    tensor = tf.convert_to_tensor(tensor)
    label = _name("reducescatter", name, [tensor])
    factors = float(prescale_factor), float(postscale_factor)
    with tf.device(device_dense or None):
        packed, context = compression.compress(tensor)
        return compression.decompress(
            _scatter(packed, chosen, *factors, label, process_set), context
        )


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """``reducescatter`` of each."""
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
    """Say that this rank has no data left; returns when all ranks have said so.

    Until then the others may go on with ``allreduce``, and with steps of a
    ``DistributedGradientTape`` or a ``DistributedOptimizer``. A rank that has joined counts as zero
    in sums and averages, which go on dividing by the number of all ranks, and does not count in
    Min, Max and Product.

    Returns:
        The rank that was last, int32; the highest of several that came together.

    Raises:
        ConfigurationError: Ranks may be lost in this job.
        MismatchError: The others called something else.
        ModelError: Some ranks are parameter servers.
    """
    check_averages("tensorflow.join")

    def wait() -> Arrays:
        return [np.array(world.collectives().join(), np.int32)]

    return run_on_host(wait, [], [[]], [tf.int32])[0]


def _allreduce_rows(
    slices: tf.IndexedSlices,
    op: ReduceOp,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """Rows that come several times add up."""
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"tf.IndexedSlices can be combined by Sum and Average; received op={op.name}. "
            "tf.convert_to_tensor makes a tensor of them."
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices can't be scaled; received prescale_factor and postscale_factor "
            f"{factors}. Multiply their values yourself."
        )
    values = allgather(slices.values, _member(name, "values"), process_set=process_set)
    indices = allgather(slices.indices, _member(name, "indices"), process_set=process_set)
    if op is Average:
        values /= tf.cast(process_set.collectives().size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _reduce(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    label: str,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    shapes = [tensor.shape for tensor in tensors]

    def run(*arrays: np.ndarray) -> Arrays:
        return reduce_all(
            process_set.collectives(),
            arrays,
            op,
            prescale=prescale,
            postscale=postscale,
            name=label,
        )

    on_devices = world.device_collectives() if process_set is global_process_set else None

    @tf.custom_gradient
    def reduced(*values: tf.Tensor) -> Any:
        if on_devices is not None and op is not Adasum and on_devices.takes(values):
            results = _reduce_on_devices(on_devices, values, op, prescale, postscale, label)
        else:
            results = run_on_host(run, values, shapes)

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            of = f"gradient of {label}"
            if op in (Sum, Average, Adasum):
                return _reduce(upstream, op, prescale, postscale, of, process_set)
            factor = prescale * postscale
            return [
                run_on_host(_selected, [up, value], [value.shape])[0] * tf.cast(factor, value.dtype)
                for up, value in zip(upstream, values)
            ]

        def _selected(upstream: np.ndarray, value: np.ndarray) -> Arrays:
            return [_share_of(op, upstream, scale(value, prescale), label, process_set)]

        return results, backward

    return list(cast("Any", reduced(*tensors)))


def _reduce_on_devices(
    on_devices: DeviceCollectives,
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    label: str,
) -> list[tf.Tensor]:
    results: list[Any] = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        scaled = [_scaled(tensors[place], prescale) for place in places]
        reduced = on_devices.allreduce(scaled, op.of_engine, name=label)
        for place, tensor in zip(places, reduced):
            results[place] = _scaled(tensor, postscale)
    return results


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """``scale`` of a tensor where it is."""
    if factor == 1.0:
        return tensor
    wide = tensor.dtype if tensor.dtype.size > 2 else tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _share_of(
    op: ReduceOp, upstream: np.ndarray, value: np.ndarray, label: str, process_set: ProcessSet
) -> np.ndarray:
    """What this rank's value has to do with a minimum, maximum or product, times ``upstream``.

    Ranks whose values are alike share what a minimum or maximum is worth.

    Args:
        op: Min, Max or Product.
        upstream: Of the result; that of all ranks counts.
        value: What went in, after scaling.
        label: Of the operation.
        process_set: Of the operation.
    """
    collectives, of = process_set.collectives(), f"gradient of {label}"
    total = collectives.allreduce(upstream, "sum", name=of)
    every = collectives.allgather(value[np.newaxis], name=of)
    if op is Product:
        others = np.delete(every, collectives.rank, axis=0)
        return np.asarray(total * np.prod(others, axis=0), value.dtype)
    best = every.min(axis=0) if op is Min else every.max(axis=0)
    chosen = (every == best).astype(value.dtype)
    return np.asarray(total * chosen[collectives.rank] / chosen.sum(axis=0), value.dtype)


def _scatter(
    tensor: tf.Tensor,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    label: str,
    process_set: ProcessSet,
) -> tf.Tensor:
    @tf.custom_gradient
    def scattered(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def run(array: np.ndarray) -> Arrays:
            collectives = process_set.collectives()
            whole_average = op is Average and array.dtype.kind in "iu"
            how = Sum if whole_average else op
            factor = postscale / collectives.size if whole_average else postscale
            scaled = scale(array, prescale)
            return [scale(collectives.reduce_scatter(scaled, how.of_engine, name=label), factor)]

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            def collect(array: np.ndarray) -> Arrays:
                collectives = process_set.collectives()
                factor = prescale * postscale * (collectives.size if op is Sum else 1)
                scaled = scale(array, factor)
                return [collectives.allgather(scaled, name=f"gradient of {label}")]

            return run_on_host(collect, [upstream], [value.shape])[0]

        (result,) = run_on_host(run, [value], [_any_rows(value)])
        return result, backward

    return scattered(tensor)


def _any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    """Its shape, with any first dimension."""
    if tensor.shape.rank is None:
        return tensor.shape
    return tf.TensorShape([None, *tensor.shape[1:]])


def _member(name: str | None, which: int | str) -> str | None:
    """The name of an operation that is part of a named one."""
    return None if name is None else f"{name}_{which}"


def _name(what: str, name: str | None, tensors: Sequence[tf.Tensor]) -> str:
    """What errors call an operation; in a graph its tensors have names of their own.

    Ranks need not have made as many of anything before, so the numbers that TensorFlow and Keras
    count with are left out.
    """
    if name is not None:
        return name
    if tf.executing_eagerly():
        return ""
    names = [without_counts(tensor.name.partition(":")[0]) for tensor in (tensors[0], tensors[-1])]
    return f"{what} of {' to '.join(dict.fromkeys(names))}"
