"""A gradient tape for custom training loops, and the broadcast that such a loop begins with."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.tensorflow.variable_names import variable_label

__all__ = ["DistributedGradientTape", "broadcast_variables", "check_mode"]

_reducers: MutableMapping[Engine, GradientReducer] = weakref.WeakKeyDictionary()


class DistributedGradientTape:
    """Wraps a ``tf.GradientTape`` so that ``gradient`` returns averages over all ranks.

    Every rank must call ``gradient`` equally often. The mean gives each rank the same weight; where
    ranks have different batch sizes, multiply the loss by ``rows * size / rows of all ranks``.
    Works in a plain tf.function and eagerly, not in one compiled by XLA.

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
        # A tape of TensorFlow as well, with one recording, whichever of the two is asked.
        kinds: Any = cls, type(tape)
        distributed: Any = object.__new__(_mixed(*kinds))
        distributed.__dict__ = tape.__dict__
        return distributed

    def __init__(self, tape: tf.GradientTape) -> None:
        check_mode("DistributedGradientTape")
        # One for all tapes of an engine, so that signatures are compared once.
        engine = world.collectives()
        if engine not in _reducers:
            _reducers[engine] = GradientReducer.of_job()
        self._hvdtrain_reducer = _reducers[engine]

    def gradient(self, target: Any, sources: Any, **options: Any) -> Any:
        """Compute what ``tf.GradientTape.gradient`` does, averaged over the ranks.

        Raises:
            MismatchError: Sources, shapes or types differ between ranks.
            NonFiniteError: A gradient holds NaN or infinity.
        """
        own: Any = super()
        gradients = own.gradient(target, sources, **options)
        averages = self._hvdtrain_reducer.average(
            tf.nest.flatten(gradients), tf.nest.flatten(sources)
        )
        return tf.nest.pack_sequence_as(gradients, averages)


@functools.lru_cache
def _mixed(distributed: type, plain: type) -> type:
    """Return the class of tapes that are both; one for all tapes, as a loop wraps one a step."""
    bases = (plain,) if issubclass(plain, distributed) else (distributed, plain)
    return type(plain.__name__, bases, {"__slots__": ("_hvdtrain_reducer",)})


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Give every rank the values that ``root`` has; call it before the first step.

    Raises:
        ModelError: Some ranks are parameter servers; or there are no variables, as in a model that
            is not built yet, so that ranks would begin apart.
    """
    check_mode("broadcast_variables", gradients=False)
    variables = list(variables)
    if not variables:
        raise ModelError(
            "hvdtrain.broadcast_variables received no variables, as a model has none before it is "
            "built, and then ranks begin with weights of their own. Begin the model with "
            "keras.Input(shape=…), or call model.build(input_shape) or model(x[:1]), first."
        )
    collectives = world.collectives()
    if collectives.size == 1:
        return
    for variable in variables:
        name = variable_label(variable)
        variable.assign(collectives.broadcast(variable.numpy(), root, name=name))


def check_mode(what: str, *, gradients: bool = True) -> None:
    """Check that all ranks train and can average among themselves; ``what`` is the name called.

    ``gradients`` is whether they are what is averaged.

    Raises:
        ModelError: Some are parameter servers, or ranks are to average weights in their place.
    """
    settings = world.settings()
    if settings.has_servers:
        raise ModelError(
            f"hvdtrain.{what} is for ranks that all train, and in mode {settings.mode} some are "
            "parameter servers, which take gradients in model.fit alone. Train with "
            "hvdtrain.distribute(model) and model.fit, or leave --mode out."
        )
    if settings.is_local_sgd and gradients:
        raise ModelError(
            f"hvdtrain.{what} averages gradients in each step, and in mode {settings.mode} ranks "
            "average weights after many. Train with hvdtrain.distribute(model) and model.fit, or "
            "leave --mode out."
        )
