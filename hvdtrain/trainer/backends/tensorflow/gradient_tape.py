"""The gradient tape of TensorFlow, for custom training loops."""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any

import tensorflow as tf

from hvdtrain import frameworks, world
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.gradients.mode import check_mode
from hvdtrain.gradients.reducer import GradientReducer

__all__ = ["DistributedGradientTape"]

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
        if world.framework() != "tensorflow":
            raise ModelError(
                "hvdtrain.DistributedGradientTape is for TensorFlow, but hvdtrain.init() prepared "
                f"devices for {world.framework()}; use hvdtrain.DistributedOptimizer."
            )
        # One reducer for all tapes of an engine, so that signatures are compared once.
        engine = world.collectives()
        if engine not in _reducers:
            _reducers[engine] = GradientReducer.of_job(framework=frameworks.of("tensorflow"))
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
