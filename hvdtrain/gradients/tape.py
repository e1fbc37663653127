"""The gradient tape and the broadcast of initial values, for custom training loops."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.variable_names import variable_label
from hvdtrain.gradients.reducer import GradientReducer

__all__ = ["DistributedGradientTape", "broadcast_variables", "check_mode"]

_reducers: MutableMapping[Engine, GradientReducer] = weakref.WeakKeyDictionary()


class DistributedGradientTape:
    """Wraps a ``tf.GradientTape`` so that ``gradient`` returns averages over all ranks.

    All ranks must call ``gradient`` the same number of times. All ranks have the same weight in the
    average. If the batch sizes of the ranks differ, multiply each rank's loss by the rank's number
    of rows and by the number of ranks, and divide it by the number of rows of all ranks. The tape
    works eagerly and in a tf.function, but XLA can't compile it.

    Example::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvdtrain.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        tape: The tape that recorded the loss.
    """

    _hvdtrain_reducer: GradientReducer

    def __new__(cls, tape: tf.GradientTape, *_: Any, **__: Any) -> Any:
        """Create an instance of a class that is derived from both this class and the tape's class.

        The instance uses what ``tape`` has recorded.
        """
        kinds: Any = cls, type(tape)
        distributed: Any = object.__new__(_mixed(*kinds))
        distributed.__dict__ = tape.__dict__
        return distributed

    def __init__(self, tape: tf.GradientTape) -> None:
        check_mode("DistributedGradientTape")
        # One reducer for all tapes of an engine, so that signatures are compared once.
        engine = world.collectives()
        if engine not in _reducers:
            _reducers[engine] = GradientReducer.of_job()
        self._hvdtrain_reducer = _reducers[engine]

    def gradient(self, target: Any, sources: Any, **options: Any) -> Any:
        """Compute gradients like ``tf.GradientTape.gradient``, and average them over all ranks.

        Raises:
            MismatchError: If sources, shapes or dtypes differ between ranks.
            NonFiniteError: If a gradient contains NaN or infinity.
        """
        plain: Any = super()
        gradients = plain.gradient(target, sources, **options)
        averages = self._hvdtrain_reducer.average(
            tf.nest.flatten(gradients), tf.nest.flatten(sources)
        )
        return tf.nest.pack_sequence_as(gradients, averages)


@functools.lru_cache
def _mixed(distributed: type, plain: type) -> type:
    """Return a class that is derived from two classes."""
    bases = (plain,) if issubclass(plain, distributed) else (distributed, plain)
    return type(plain.__name__, bases, {"__slots__": ("_hvdtrain_reducer",)})


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
        variable.assign(collectives.broadcast(variable.numpy(), root, name=name))


def check_mode(what: str, *, gradients: bool = True) -> None:
    """Check that a public function can be used in the job's mode.

    ``gradients`` says whether the function averages gradients.

    Raises:
        ModelError: If some ranks are parameter servers. Also if the function averages gradients,
            but the ranks average weights, as in ``--mode local-sgd``.
    """
    settings = world.settings()
    if settings.has_servers:
        raise ModelError(
            f"hvdtrain.{what} does not support mode {settings.mode}, in which some ranks are "
            "parameter servers that only work with model.fit. Train with "
            "hvdtrain.distribute(model) and model.fit, or omit --mode."
        )
    if settings.is_local_sgd and gradients:
        raise ModelError(
            f"hvdtrain.{what} averages gradients in each step, and does not support mode "
            f"{settings.mode}, in which ranks average weights after many steps. Train with "
            "hvdtrain.distribute(model) and model.fit, or omit --mode."
        )
