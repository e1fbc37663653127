"""The one reducer of gradients with what Horovod's users can ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import ExchangeOptions, ReduceOptions
from hvdtrain.horovod.op_constants import Average, Sum, choose_op

__all__ = ["optimizer_reducer", "reducer_for", "trainable_weights_of"]


def reducer_for(arguments: Mapping[str, Any]) -> GradientReducer:
    """Make the reducer that a tape or an optimizer is asked for.

    Args:
        arguments: Those of Horovod's ``DistributedOptimizer`` or ``DistributedGradientTape``, by
            their names; others may be among them, as AutoGraph adds to ``locals()``.

    Raises:
        ValueError: What was asked for does not fit together.
    """
    op, factor = choose_op(arguments["op"]), arguments["gradient_predivide_factor"]
    if factor != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={factor} is for op=Average; received op={op.name}."
        )
    groups = arguments["groups"]
    exchange = ExchangeOptions(
        op=op.of_tensors,
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


def optimizer_reducer(arguments: Mapping[str, Any]) -> GradientReducer:
    """Make the reducer that an optimizer is asked for; see ``reducer_for``."""
    op = choose_op(arguments["op"])
    if op not in (Average, Sum):
        raise ValueError(f"Received op={op.name}; expected Average or Sum.")
    return reducer_for(arguments)


def trainable_weights_of(layers: Any) -> list[Any]:
    """The variables of one or more Keras layers, or of None.

    Raises:
        ValueError: Something else is among them.
    """
    given = layers if isinstance(layers, Sequence) else [layers]
    found: list[Any] = []
    for layer in () if layers is None else given:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"Received {type(layer).__name__} among local_layers; expected Keras layers."
            )
        found += layer.trainable_weights
    return found
