"""The functions that hvdtrain needs from the framework of the program."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from hvdtrain.frameworks.interface import Framework

if TYPE_CHECKING:
    from hvdtrain.collectives.engine import Engine

__all__ = ["Framework", "of", "of_keras", "stack_ranks"]


def of(name: str) -> Framework:
    """Return the functions for ``"tensorflow"``, ``"torch"`` or ``"jax"``."""
    return cast(Framework, importlib.import_module(f"hvdtrain.frameworks.{name}.tensors"))


def of_keras() -> Framework:
    """Return the functions for the framework on which Keras runs."""
    import keras

    return of(keras.backend.backend())


def stack_ranks(collectives: Engine, tensor: Any, name: str) -> Any:
    """Stack the tensors of all ranks along a new first axis, in rank order.

    The gradient is summed over all ranks. Suppose that each rank computes a loss from the result,
    and the losses are averaged over the ranks. The gradient is then the same as if one process had
    computed the loss from the inputs of all ranks.

    The tensors of all ranks must have the same shape and type.

    Returns:
        Tensor of shape ``(ranks, *tensor.shape)``. On TensorFlow, it has a row for each remaining
        rank. On torch and JAX, it has a row for each rank of the job, with zeros for lost ranks.
    """
    import keras

    module = f"hvdtrain.frameworks.{keras.backend.backend()}.differentiable_ops"
    return importlib.import_module(module).stack_ranks(collectives, tensor, name)
