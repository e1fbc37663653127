"""A gradient tape for custom training loops, and the broadcast that such a loop begins with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.tensorflow.variable_names import variable_label, variable_name

__all__ = ["DistributedGradientTape", "broadcast_variables", "check_averages"]


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

    def __init__(self, tape: tf.GradientTape) -> None:
        self._tape = tape
        self._reducer = _shared_reducer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._tape.__exit__(*exc)

    def gradient(self, target: Any, sources: Any, **options: Any) -> Any:
        """As ``tf.GradientTape.gradient``, averaged over the ranks.

        Raises:
            MismatchError: Sources, shapes or types differ between ranks.
            NonFiniteError: A gradient holds NaN or infinity.
        """
        gradients = self._tape.gradient(target, sources, **options)
        flat = tf.nest.flatten(gradients)
        names = [variable_name(source) for source in tf.nest.flatten(sources)]
        return tf.nest.pack_sequence_as(gradients, self._reducer.average(flat, names))


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Give every rank the values that ``root`` has; call it before the first step.

    Raises:
        ModelError: Some ranks are parameter servers.
    """
    check_averages("broadcast_variables")
    collectives = world.collectives()
    if collectives.size == 1:
        return
    for variable in variables:
        name = variable_label(variable)
        variable.assign(collectives.broadcast(variable.numpy(), root, name=name))


def check_averages(what: str) -> None:
    """See that all ranks train, so that they can average among themselves.

    Args:
        what: Of hvdtrain's names, the one that was called.

    Raises:
        ModelError: Some are parameter servers.
    """
    settings = world.settings()
    if settings.has_servers:
        raise ModelError(
            f"hvdtrain.{what} is for ranks that all train, and in mode {settings.mode} some are "
            "parameter servers, which take gradients in model.fit alone. Train with "
            "hvdtrain.distribute(model) and model.fit, or leave --mode out."
        )


_reducers: dict[int, GradientReducer] = {}


def _shared_reducer() -> GradientReducer:
    """One reducer for all tapes of an engine, so that signatures are compared once."""
    check_averages("DistributedGradientTape")
    collectives = world.collectives()
    reducer = _reducers.get(id(collectives))
    if reducer is None:
        reducer = GradientReducer.of_job()
        _reducers[id(collectives)] = reducer
    return reducer
