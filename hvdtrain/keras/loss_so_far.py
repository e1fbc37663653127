"""The rows that a rank has trained on in an epoch, and their loss, by Keras' own metric."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain.private_api.keras import loss_tracker

__all__ = ["LossSoFar", "number_of"]


@dataclass(frozen=True, kw_only=True)
class LossSoFar:
    """This rank's steps, rows and sum of losses in this epoch so far, by Keras' own loss metric."""

    steps: int = 0
    rows: float = 0.0
    loss_sum: float = 0.0

    @classmethod
    def of(cls, model: keras.Model, steps: int) -> LossSoFar:
        """Read a model's metric after so many steps of an epoch; waits for the device."""
        # The mean of the losses, weighted by rows: the only place where Keras keeps the rows.
        tracker = loss_tracker(model)
        if tracker is None:
            return cls(steps=steps)
        return cls(steps=steps, rows=number_of(tracker.count), loss_sum=number_of(tracker.total))

    def loss(self, logs: Any) -> float:
        """Return the average; where a user's train_step keeps none, what it reports, or NaN."""
        return (
            self.loss_sum / self.rows
            if self.rows > 0
            else float((logs or {}).get("loss", math.nan))
        )


def number_of(variable: Any) -> float:
    """The value of a variable of one element."""
    return float(keras.ops.convert_to_tensor(variable))
