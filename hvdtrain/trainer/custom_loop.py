"""Functions for custom training loops, which apply gradients instead of calling ``fit``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.variable_names import variable_label
from hvdtrain.gradients.mode import check_mode
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.backends import check_framework
from hvdtrain.trainer.optimizer_patch import distribute_optimizer
from hvdtrain.trainer.variables import array_of, assign

__all__ = ["DistributedOptimizer", "broadcast_variables"]


def DistributedOptimizer(optimizer: Any) -> Any:
    """Make an optimizer average gradients over all ranks before it applies them.

    Use it in custom training loops that call ``optimizer.apply``, or ``optimizer.stateless_apply``
    on JAX. The calls may be inside ``tf.function``, ``torch.compile`` or ``jax.jit``. All ranks
    must make the same calls. If you train with ``fit``, use ``distribute`` instead.

    Args:
        optimizer: A Keras 3 optimizer.

    Returns:
        The same optimizer. It is saved and loaded as a plain Keras optimizer.

    Raises:
        ModelError: If ``optimizer`` is not a Keras 3 optimizer, if some ranks are parameter
            servers, or if Keras does not use the framework of ``hvdtrain.init()``.
    """
    check_mode("DistributedOptimizer")
    check_framework()
    if world.collectives().size == 1:
        return optimizer
    return distribute_optimizer(optimizer, GradientReducer.of_job())


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Set the variables of all ranks to the values of ``root``.

    All ranks must call this before the first step.

    Raises:
        ModelError: If some ranks are parameter servers, or if ``variables`` is empty, for example
            because the model is not built yet.
    """
    check_mode("broadcast_variables", gradients=False)
    variables = list(variables)
    if not variables:
        raise ModelError(
            "hvdtrain.broadcast_variables got no variables; a model has none before it is built. "
            "Start the model with keras.Input(shape=…), or call model.build(input_shape) or "
            "model(x[:1]) first."
        )
    collectives = world.collectives()
    if collectives.size == 1:
        return
    for variable in variables:
        name = variable_label(variable)
        assign(variable, collectives.broadcast(array_of(variable), root, name=name))
