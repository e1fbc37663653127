"""Horovod's reductions of tensors, with gradients; in tf.functions and eagerly, not in XLA.

All ranks call them in the same order: nothing negotiates. What differs in name, shape or type is
an error on every rank; what only some ranks call is one after ``HVDTRAIN_TIMEOUT_S``.

Their gradients are those that Horovod gives: of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.kernels import ReduceOp as EngineOp
from hvdtrain.gradients.allreduce import exchange
from hvdtrain.gradients.array_reduction import scale
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.reduction_options import ExchangeOptions
from hvdtrain.gradients.tape import check_mode
from hvdtrain.horovod.op_constants import Average, ReduceOp, Sum, choose_op
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.tensorflow.differentiable_ops import any_rows, differentiable
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host
from hvdtrain.tensorflow.variable_names import operation_label

__all__ = [
    "allreduce",
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
        ignore_name_scope: Has no effect: names here have no scopes.

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
    how = ExchangeOptions(
        op=choose_op(op, average).of_tensors,
        compression=compression,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    return exchange(tensors, how, process_set, name)


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
        op: Average or Sum.

    All other arguments are those of ``allreduce``.

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
    label = operation_label("reducescatter", name, [tensor])

    def scatter(array: np.ndarray) -> np.ndarray:
        collectives = process_set.collectives()
        # Whole numbers have no mean of their own type: the fraction of it goes.
        whole_average = chosen is Average and array.dtype.kind in "iu"
        how: EngineOp = "sum" if whole_average or chosen is Sum else "average"
        factor = postscale_factor / collectives.size if whole_average else postscale_factor
        scaled = scale(array, float(prescale_factor))
        return scale(collectives.reduce_scatter(scaled, how, name=label), float(factor))

    def gather(array: np.ndarray) -> np.ndarray:
        collectives = process_set.collectives()
        factor = prescale_factor * postscale_factor * (collectives.size if chosen is Sum else 1)
        return collectives.allgather(scale(array, float(factor)), name=f"gradient of {label}")

    with tf.device(device_dense or None):
        packed, context = compression.compress(tensor)
        scattered = differentiable(scatter, gather, packed, any_rows(packed))
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
    """Do ``reducescatter`` with each of several tensors, one after the other."""
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
    check_mode("tensorflow.join", gradients=False)

    def wait() -> Arrays:
        return [np.array(world.collectives().join(), np.int32)]

    return run_on_host(wait, [], [[]], [tf.int32])[0]
