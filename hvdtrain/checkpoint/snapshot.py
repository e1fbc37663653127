"""The content of a checkpoint, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Snapshot"]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything of one moment of the training, in memory.

    Attributes:
        step: Completed optimizer steps of the whole training; names the checkpoint.
        state: Values that JSON can hold, and numbers that aren't finite: the epoch, the
            position in the data, callbacks. Tuples come back as lists.
        model: Weights and optimizer, by name.
        ranks: Arrays that differ by rank, under names such as ``rank/3/seed``.
    """

    step: int
    state: Mapping[str, Any]
    model: Mapping[str, np.ndarray]
    ranks: Mapping[str, np.ndarray]
