"""Random numbers in TensorFlow's graphs that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.private_api.keras import global_generator
from hvdtrain.trainer.rank_random import RankGenerator, random_by_rank

__all__ = ["GraphRankGenerator", "draws_of_step", "random_of_step"]


class GraphRankGenerator(RankGenerator):
    """A ``RankGenerator`` that records which seeds a graph draws."""

    def __init__(self, shared: Any, member: int) -> None:
        super().__init__(shared, member)
        self.draws: list[tuple[Any, bool]] = []
        """The graph of each draw, and its argument ``ordered``."""

    def next(self, ordered: bool = True) -> Any:
        """Draw a seed, as ``keras.random.SeedGenerator`` does."""
        if not tf.executing_eagerly():
            self.draws.append((tf.compat.v1.get_default_graph(), ordered))
        return super().next(ordered)

    def _create(self) -> Any:
        with tf.init_scope():
            return super()._create()

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
    """Return the list of seeds that the current step draws: ``GraphRankGenerator.draws``.

    The list is empty outside of a step. A caller that discards a graph must delete its entries.
    """
    generator = global_generator()
    return generator.draws if isinstance(generator, GraphRankGenerator) else []


@contextmanager
def random_of_step(member: int) -> Iterator[GraphRankGenerator]:
    """Make random numbers of a step, also of TensorFlow, differ by rank in the block."""
    graph = None if tf.executing_eagerly() or not member else tf.compat.v1.get_default_graph()
    seed = None if graph is None else graph.seed
    if graph is not None and seed is not None:
        bits = np.random.SeedSequence([int(abs(seed)), member])
        graph.seed = int(bits.generate_state(1)[0]) % (2**31 - 1)
    try:
        with random_by_rank(member, GraphRankGenerator) as generator:
            yield generator
    finally:
        if graph is not None:
            graph.seed = seed
