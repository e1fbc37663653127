"""Arguments that Horovod's functions share: reductions, gradient options and local layers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, cast

import keras

from hvdtrain.gradients.array_reduction import TensorOp
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import ExchangeOptions, ReduceOptions

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "choose_op",
    "make_reducer",
    "trainable_weights",
]


class ReduceOp(enum.IntEnum):
    """A reduction operation, with the number that Horovod assigns to it."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @property
    def tensor_op(self) -> TensorOp:
        """The name of the operation in ``hvdtrain.gradients``."""
        return cast("TensorOp", self.name.lower())


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def choose_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """Return the operation that ``op`` or the deprecated ``average`` selects.

    The default is Average.

    Raises:
        ValueError: If both arguments are given, or if ``op`` is not a reduction.
    """
    if op is not None and average is not None:
        raise ValueError(
            f"op and average can't be combined, got op={op!r} and average={average!r}; leave out "
            "average, which is deprecated."
        )
    if op is None:
        return Sum if average is False else Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(entry.name for entry in ReduceOp)
        raise ValueError(f"op must be one of {names}, got {op!r}.") from None


def make_reducer(arguments: Mapping[str, Any], ops: Sequence[ReduceOp] = ()) -> GradientReducer:
    """Return the gradient reducer for the arguments of a Horovod tape or optimizer.

    Args:
        arguments: Arguments by name. Unknown names are ignored, because AutoGraph adds some to
            ``locals()``.
        ops: Supported operations. If empty, all are supported.

    Raises:
        ValueError: If the arguments contradict each other, or ``op`` is not supported.
    """
    op, factor = choose_op(arguments["op"]), arguments["gradient_predivide_factor"]
    if ops and op not in ops:
        raise ValueError(f"op must be {' or '.join(o.name for o in ops)}, got {op.name}.")
    if factor != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={factor} requires op=Average, got op={op.name}."
        )
    groups = arguments["groups"]
    exchange = ExchangeOptions(
        op=op.tensor_op,
        compression=arguments["compression"],
        prescale=1.0 / factor,
        postscale=factor,
        device_dense=arguments["device_dense"],
        device_sparse=arguments["device_sparse"],
    )
    options = ReduceOptions(
        unchecked=exchange,
        sparse_as_dense=arguments["sparse_as_dense"],
        groups=groups if groups is not None else arguments["num_groups"] or None,
        scale_local=arguments["scale_local_gradients"],
    )
    return GradientReducer(arguments["process_set"], options)


def trainable_weights(layers: Any) -> list[Any]:
    """Return the trainable weights of a Keras layer, a sequence of layers, or None.

    Raises:
        ValueError: If an entry is not a Keras layer.
    """
    if layers is None:
        return []
    layers = layers if isinstance(layers, Sequence) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers must be Keras layers, got {type(layer).__name__}.")
    return [weight for layer in layers for weight in layer.trainable_weights]
