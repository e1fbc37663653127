"""Random numbers that differ between ranks.

The global seed is equal on all ranks, because all ranks must read the data in the same order.
Random numbers within layers and steps must differ between ranks. Otherwise Dropout layers would
drop the same units on all ranks, although the ranks have different samples. The chief draws the
same random numbers as a single process would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

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
        self._member = member

    def next(self, ordered: bool = True) -> Any:
        """Draw a seed, as ``keras.random.SeedGenerator`` does."""
        if self.shared is None:
            # Created on first use, as Keras does. Python's generator is equal on every rank.
            set_global_generator(None)
            self.shared = self._create()
            set_global_generator(self)
        drawn = self.shared.next(ordered)
        return drawn + keras.ops.convert_to_tensor([self._member, 0], dtype=drawn.dtype)

    def _create(self) -> Any:
        return make_global_generator()


@contextmanager
def random_by_rank(member: int, kind: Callable[[Any, int], Any] = RankGenerator) -> Iterator[Any]:
    """Make random numbers differ by rank in the block, which gets the generator."""
    own = kind(global_generator(), member)
    set_global_generator(own)
    try:
        yield own
    finally:
        set_global_generator(own.shared)
