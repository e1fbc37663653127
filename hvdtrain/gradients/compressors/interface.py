"""The contract of what averages arrays over the ranks by sending a part of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.interface import Collectives

__all__ = ["GradientCompressor", "SentMeans"]


class SentMeans(NamedTuple):
    """The result of averaging some arrays of all ranks.

    Attributes:
        means: The means of what was sent, the same on all ranks, to the bit.
        unsent: What is left to this rank: the mean of it over the ranks is what the means lack.
        states: What to pass the next time.
        weight: The mean of the ranks' weights.
    """

    means: list[np.ndarray]
    unsent: list[np.ndarray]
    states: list[np.ndarray]
    weight: float


class GradientCompressor(ABC):
    """Averages float32 arrays over the ranks, nearly.

    What is not finite in an array of any rank shows in the mean.
    """

    @abstractmethod
    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether it sends less of such an array than there is."""

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept for such an array from step to step; zeros at first."""
        return (0,)

    @abstractmethod
    def average(
        self,
        collectives: Collectives,
        arrays: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        *,
        weight: float,
        name: str,
    ) -> SentMeans:
        """Average the arrays of all ranks; collective.

        Args:
            collectives: The engine of the ranks.
            arrays: Float32, of shapes that ``takes`` takes.
            states: What the call before returned, alike on all ranks.
            weight: Averaged without loss, over the ranks whose arrays are in the means.
            name: Stands in errors.
        """
