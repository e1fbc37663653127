"""Horovod's collectives on anything that makes a tensor, as its modules for Keras have them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.horovod import exchange_ops, reduction_ops
from hvdtrain.horovod.op_constants import Average, ReduceOp

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
    """Combine the values of all ranks; as ``hvdtrain.tensorflow.allreduce``."""
    return reduction_ops.allreduce(
        tf.convert_to_tensor(value),
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """The values of all ranks, one after the other; as ``hvdtrain.tensorflow.allgather``."""
    return exchange_ops.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """The value of one rank; as ``hvdtrain.tensorflow.broadcast``."""
    return exchange_ops.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """This rank's share of the combined values; as ``hvdtrain.tensorflow.reducescatter``."""
    return reduction_ops.reducescatter(value, op=op, name=name)
