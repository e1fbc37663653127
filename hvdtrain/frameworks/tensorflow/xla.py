"""Compilation of parts of a step with XLA.

XLA can't compile collectives, so the parts between the collectives are compiled separately.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.frameworks.tensorflow.graph_order import operation_types
from hvdtrain.log import COMMON
from hvdtrain.private_api.tensorflow import xla_can_compile

__all__ = ["compiled_if_possible"]


def compiled_if_possible(what: str, function: Callable[..., Any], *gradients: Any) -> Any:
    """Compile a function with XLA and call it.

    The function may use tensors of the current graph.

    If XLA does not support one of the function's operations, a message is logged, and the
    operations are added to the current graph without compilation.

    Args:
        what: Noun phrase that names the function in the log message.
        function: Returns nested tensors or None. This function is called again if it can't be
            compiled.
        gradients: Arguments of the function. If the function is compiled, the rows of sparse
            gradients are padded.
    """
    padded = [_pad_rows(gradient) for gradient in gradients]
    compiled = tf.function(lambda: function(*padded), jit_compile=True, autograph=False)
    types = operation_types(compiled.get_concrete_function().graph) - {"Placeholder"}
    unsupported = sorted(name for name in types if not xla_can_compile(name))
    if not unsupported:
        return compiled()
    _log_once(what, ", ".join(unsupported))
    return function(*gradients)


@functools.cache  # a step is traced several times
def _log_once(what: str, unsupported: str) -> None:
    COMMON.info("jit_compile is ignored for %s, because XLA does not support %s", what, unsupported)


def _pad_rows(gradient: Any) -> Any:
    """Pad the rows of ``tf.IndexedSlices`` to a power of two. Return dense tensors unchanged.

    XLA would compile again for each new number of rows. The indices of the added rows are outside
    of the variable, and compiled scatter operations ignore such rows.
    """
    if not isinstance(gradient, tf.IndexedSlices) or gradient.indices.shape[0] is not None:
        return gradient
    rows = tf.shape(gradient.indices)[0]
    bits = tf.math.ceil(tf.math.log(tf.cast(tf.maximum(rows, 1), tf.float64)) / math.log(2.0))
    added = tf.cast(tf.pow(tf.constant(2.0, tf.float64), bits), tf.int32) - rows
    outside = tf.cast(gradient.dense_shape[0], gradient.indices.dtype)
    columns = [[0, 0]] * (gradient.values.shape.rank - 1)
    return tf.IndexedSlices(
        tf.pad(gradient.values, [[0, added], *columns]),
        tf.pad(gradient.indices, [[0, added]], constant_values=outside),
        gradient.dense_shape,
    )
