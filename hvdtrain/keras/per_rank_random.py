"""Random numbers within the steps of a model, drawn by each rank for itself.

Layers have generators of their own, see ``reseed_by_rank``. This is for what a ``train_step`` or a
layer draws without one: from TensorFlow's global seed, which is alike on all ranks so that they
read their data in one order, and from the generator behind ``keras.random``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.private_api.keras import (
    global_generator,
    make_global_generator,
    set_global_generator,
)

__all__ = ["drawn_by"]


@contextmanager
def drawn_by(member: int) -> Iterator[None]:
    """Within the block draw numbers of this member; those of member 0 are the program's own.

    In a graph, what is put into it draws them. Run eagerly, ``tf.random`` has one order of numbers
    for the whole program, which is left alone.
    """
    if member == 0:
        yield
        return
    own = _OfMember(global_generator(), member)
    set_global_generator(own)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    seed = None if graph is None else graph.seed
    if graph is not None and seed is not None:
        words = np.random.SeedSequence([int(abs(seed)), member]).generate_state(1)
        graph.seed = int(words[0]) % (2**31 - 1)
    try:
        yield
    finally:
        set_global_generator(own.shared)
        if graph is not None:
            graph.seed = seed


class _OfMember:
    """The random generator of the process, whose state is saved, with this rank's numbers."""

    def __init__(self, shared: Any, member: int) -> None:
        self.shared = shared
        self._member = member

    def next(self, ordered: bool = True) -> Any:
        if self.shared is None:
            # Keras makes it when it is first used, from Python's generator: so on every rank.
            set_global_generator(None)
            self.shared = make_global_generator()
            set_global_generator(self)
        drawn = self.shared.next(ordered)
        return drawn + keras.ops.convert_to_tensor([self._member, 0], dtype=drawn.dtype)
