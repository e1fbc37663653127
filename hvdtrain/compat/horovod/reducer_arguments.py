"""Arguments of Horovod's optimizers and tapes for TensorFlow: gradient options and local layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain import frameworks
from hvdtrain.compat.horovod.exchange import ExchangeOptions, exchange
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, choose_op
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import ReduceOptions

__all__ = ["make_reducer", "trainable_weights"]


def make_reducer(arguments: Mapping[str, Any], ops: Sequence[ReduceOp] = ()) -> GradientReducer:
    """Return the gradient reducer for the arguments of a Horovod tape or optimizer.

    Args:
        arguments: The arguments as a dictionary. Unknown names are ignored, because AutoGraph adds
            names to ``locals()``.
        ops: Supported reductions. If empty, all reductions are supported.

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
    how = ExchangeOptions(
        op=op.tensor_op,
        compression=arguments["compression"],
        prescale=1.0 / factor,
        postscale=factor,
        device_dense=arguments["device_dense"],
        device_sparse=arguments["device_sparse"],
    )
    options = ReduceOptions(
        unchecked=lambda tensors, ranks: exchange(tensors, how, ranks),
        sparse_as_dense=arguments["sparse_as_dense"],
        groups=groups if groups is not None else arguments["num_groups"] or None,
        scale_local=arguments["scale_local_gradients"],
    )
    return GradientReducer(arguments["process_set"], options, frameworks.of("tensorflow"))


def trainable_weights(layers: Any) -> list[Any]:
    """Return the trainable weights of ``local_layers``.

    The argument is a Keras layer, a sequence of layers, or None.

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
