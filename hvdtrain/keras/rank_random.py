"""Random numbers that differ by rank."""

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
    "MemberGenerator",
    "draw_seed",
    "drawn_by",
    "draws_of_step",
    "reseed_by_rank",
    "seed_generators",
    "seed_of_rank",
]


class MemberGenerator:
    """The random generator of the process, whose state is saved, with the numbers of a member."""

    def __init__(self, shared: Any, member: int) -> None:
        self.shared = shared
        self.draws: list[tuple[Any, bool]] = []
        """The graph of each draw, and whether it was ordered."""
        self._member = member

    def next(self, ordered: bool = True) -> Any:
        """Draw, as a Keras ``SeedGenerator``."""
        if self.shared is None:
            # Keras makes it when it is first used, from Python's generator: so on every rank.
            set_global_generator(None)
            with tf.init_scope():
                self.shared = make_global_generator()
            set_global_generator(self)
        if not tf.executing_eagerly():
            self.draws.append((tf.compat.v1.get_default_graph(), ordered))
        drawn = self.shared.next(ordered)
        return drawn + keras.ops.convert_to_tensor([self._member, 0], dtype=drawn.dtype)

    def repeat(self) -> None:
        """Draw as often as the graphs have drawn that were made so far.

        A function is traced twice if its first trace makes the generator: the last trace counts.
        """
        last = {graph.name: graph for graph, _ in self.draws}
        for graph, ordered in list(self.draws):
            if graph is last[graph.name]:
                self.next(ordered)


def draws_of_step() -> list[tuple[Any, bool]]:
    """Return the draws noted so far; whoever drops a graph takes its draws from this list."""
    generator = global_generator()
    return generator.draws if isinstance(generator, MemberGenerator) else []


@contextmanager
def drawn_by(member: int) -> Iterator[MemberGenerator]:
    """Within the block draw numbers of this member; those of member 0 are the program's own.

    In a graph, what is put into it draws them. Run eagerly, ``tf.random`` has one order of numbers
    for the whole program, which is left alone.
    """
    own = MemberGenerator(global_generator(), member)
    set_global_generator(own)
    graph = None if tf.executing_eagerly() or not member else tf.compat.v1.get_default_graph()
    seed = None if graph is None else graph.seed
    if graph is not None and seed is not None:
        words = np.random.SeedSequence([int(abs(seed)), member]).generate_state(1)
        graph.seed = int(words[0]) % (2**31 - 1)
    try:
        yield own
    finally:
        set_global_generator(own.shared)
        if graph is not None:
            graph.seed = seed


def draw_seed(collectives: Engine) -> int:
    """A seed for the orders of data, the chief's; takes no number from Python's generator.

    A program that goes on to draw from it, as initializers do, gets what it gets on one process.
    """
    state = random.getstate()
    seed = random.getrandbits(31)
    random.setstate(state)
    return int(collectives.broadcast_object(seed, name="seed"))


def seed_generators(model: keras.Model) -> list[Any]:
    """All random states of the model's layers."""
    found = {id(g): g for layer in flatten_layers(model) for g in seed_generators_of(layer)}
    return list(found.values())


def reseed_by_rank(model: keras.Model, collectives: Engine) -> None:
    """Let each rank draw its own random numbers; the chief's are those of a single process.

    Otherwise all ranks would drop the same units of their different samples.
    """
    for generator in seed_generators(model):
        state = np.asarray(generator.state.numpy())
        shared = collectives.broadcast(state, name="seed")
        generator.state.assign(seed_of_rank(shared, collectives.rank))


def seed_of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """The chief's random state turned into another rank's; the chief keeps it."""
    if rank == 0:
        return state
    bits = np.random.SeedSequence([int(abs(state[0])), rank])
    limit = np.iinfo(state.dtype).max
    own = state.copy()
    own[0] = int(bits.generate_state(1, np.uint64)[0]) % limit
    return own
