"""The outer optimizer of local SGD: moves weights towards the average of all ranks' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["OuterOptimizer"]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD with Nesterov momentum on what a round of steps has changed.

    DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv 2311.08105), algorithm 1. With a rate of 1 and without momentum it is plain
    averaging, local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv
    1805.09767).

    Attributes:
        learning_rate: What the outer gradient is multiplied with.
        momentum: How much of the velocity is kept, from 0 on, below 1.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def takes_average(self) -> bool:
        """Whether the average itself is what ranks go on with."""
        return self.learning_rate == 1.0 and not self.momentum

    def step(self, anchor: Any, average: Any, velocity: Any) -> tuple[Any, Any]:
        """The weights that all ranks go on with, and the next velocity.

        Args:
            anchor: The weights that the round began with; arrays or tensors, of any shape.
            average: The mean of the weights that ranks have at its end.
            velocity: What the step before returned, zeros at first; not used without momentum.
        """
        gradient = anchor - average
        if not self.momentum:
            return anchor - self.learning_rate * gradient, velocity
        velocity = self.momentum * velocity + gradient
        return anchor - self.learning_rate * (gradient + self.momentum * velocity), velocity
