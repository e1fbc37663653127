"""Horovod's collectives for Keras.

The functions accept any value that TensorFlow can convert to a tensor.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import collective_ops
from hvdtrain.compat.horovod.compression import Compression, Compressor
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> tf.Tensor:
    """Reduce the values of all ranks, like ``hvdtrain.tensorflow.allreduce``."""
    return collective_ops.allreduce(
        tf.convert_to_tensor(value),
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the values of all ranks, like ``hvdtrain.tensorflow.allgather``."""
    return collective_ops.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return the value of ``root_rank``, like ``hvdtrain.tensorflow.broadcast``."""
    return collective_ops.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """Return this rank's share of the result, like ``hvdtrain.tensorflow.reducescatter``."""
    return collective_ops.reducescatter(value, op=op, name=name)
