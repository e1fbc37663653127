"""Random numbers that differ between ranks.

The global seed is equal on all ranks, because all ranks must read the data in the same order.
Random numbers within layers and steps must differ between ranks. Otherwise Dropout layers would
drop the same units on all ranks, although the ranks have different samples. The chief draws the
same random numbers as a single process would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.private_api.keras import (
    flatten_layers,
    global_generator,
    make_global_generator,
    seed_generators_of,
    set_global_generator,
)

__all__ = [
    "RankGenerator",
    "draw_seed",
    "draws_of_step",
    "random_by_rank",
    "reseed_by_rank",
    "seed_generators",
    "seed_of_rank",
]


def draw_seed(collectives: Engine) -> int:
    """Return a seed that the chief draws from Python's random generator. All ranks must call this.

    The generator's state is restored, so that later draws, such as those of initializers, are the
    same as in a single process.
    """
    state = random.getstate()
    seed = random.getrandbits(31)
    random.setstate(state)
    return int(collectives.broadcast_object(seed, name="seed"))


def seed_generators(model: keras.Model) -> list[Any]:
    """Return the seed generators of all layers."""
    return list(
        {id(g): g for layer in flatten_layers(model) for g in seed_generators_of(layer)}.values()
    )


def reseed_by_rank(model: keras.Model, collectives: Engine) -> None:
    """Seed the generators of all layers differently on each rank. All ranks must call this."""
    for generator in seed_generators(model):
        state = np.asarray(generator.state.numpy())
        shared = collectives.broadcast(state, name="seed")
        generator.state.assign(seed_of_rank(shared, collectives.rank))


def seed_of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """Return the state of a random generator on ``rank``, given its state on the chief."""
    if rank == 0:
        return state
    bits = np.random.SeedSequence([int(abs(state[0])), rank])
    own = state.copy()
    own[0] = int(bits.generate_state(1, np.uint64)[0]) % np.iinfo(state.dtype).max
    return own


class RankGenerator:
    """Draws seeds from the generator of ``keras.random``, with a different offset on each rank.

    The state of the generator itself stays equal on all ranks. Checkpoints save this state.
    """

    def __init__(self, shared: Any, member: int) -> None:
        self.shared = shared
        self.draws: list[tuple[Any, bool]] = []
        """The graph of each draw, and its argument ``ordered``."""
        self._member = member

    def next(self, ordered: bool = True) -> Any:
        """Draw a seed, as ``keras.random.SeedGenerator`` does."""
        if self.shared is None:
            # Created on first use, as Keras does. Python's generator is equal on every rank.
            set_global_generator(None)
            with tf.init_scope():
                self.shared = make_global_generator()
            set_global_generator(self)
        if not tf.executing_eagerly():
            self.draws.append((tf.compat.v1.get_default_graph(), ordered))
        drawn = self.shared.next(ordered)
        return drawn + keras.ops.convert_to_tensor([self._member, 0], dtype=drawn.dtype)

    def repeat(self) -> None:
        """Repeat the draws of the functions that have been traced so far.

        If tracing a function creates the generator, TensorFlow traces the function again. Only the
        draws of the last trace are repeated then.
        """
        last = {graph.name: graph for graph, _ in self.draws}
        for graph, ordered in list(self.draws):
            if graph is last[graph.name]:
                self.next(ordered)


def draws_of_step() -> list[tuple[Any, bool]]:
    """Return the list of seeds that the current step draws: ``RankGenerator.draws``.

    The list is empty outside of a step. A caller that discards a graph must delete its entries.
    """
    generator = global_generator()
    return generator.draws if isinstance(generator, RankGenerator) else []


@contextmanager
def random_by_rank(member: int) -> Iterator[RankGenerator]:
    """Make random numbers differ between ranks within the ``with`` block."""
    own = RankGenerator(global_generator(), member)
    set_global_generator(own)
    graph = None if tf.executing_eagerly() or not member else tf.compat.v1.get_default_graph()
    seed = None if graph is None else graph.seed
    if graph is not None and seed is not None:
        bits = np.random.SeedSequence([int(abs(seed)), member])
        graph.seed = int(bits.generate_state(1)[0]) % (2**31 - 1)
    try:
        yield own
    finally:
        set_global_generator(own.shared)
        if graph is not None:
            graph.seed = seed
