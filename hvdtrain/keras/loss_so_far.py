"""How many rows a rank has trained on, and with which loss, by Keras' own metric."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain.private_api.keras import loss_tracker

__all__ = ["LossSoFar", "number_of"]


@dataclass(frozen=True, kw_only=True)
class LossSoFar:
    """What this rank has gone through in this epoch, by Keras' own loss metric."""

    steps: int = 0
    rows: float = 0.0
    loss_sum: float = 0.0

    @classmethod
    def of(cls, model: keras.Model, steps: int) -> LossSoFar:
        """What a model's metric says after so many steps of an epoch; waits for the device."""
        # The mean of the losses, weighted by rows: the only place where Keras keeps the rows.
        tracker = loss_tracker(model)
        if tracker is None:
            return cls(steps=steps)
        return cls(steps=steps, rows=number_of(tracker.count), loss_sum=number_of(tracker.total))

    def loss(self, logs: Any) -> float:
        """The average; in a train_step of the user's that keeps none, what it reports, if any."""
        return (
            self.loss_sum / self.rows
            if self.rows > 0
            else float((logs or {}).get("loss", math.nan))
        )


def number_of(variable: Any) -> float:
    """The value of a variable of one element."""
    return float(keras.ops.convert_to_numpy(variable))
