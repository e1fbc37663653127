"""Putting the predictions of all ranks back into the order of the input."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.base import Collectives
from hvdtrain.errors import DataError

__all__ = ["join_predictions"]


def join_predictions(mine: Any, collectives: Collectives, *, interleaved: bool) -> Any:
    """Gather what each rank predicted.

    Args:
        mine: ``{"outputs": structure of arrays, "rows": int64 (steps, 2)}``: for each step how
            many rows count (all or none) and how many there are.
        collectives: The engine.
        interleaved: Whether step k of all ranks together is step k of the input; otherwise the
            parts simply follow each other in rank order.

    Returns:
        The structure, with all rows of all ranks, alike on every rank.
    """
    counts = np.asarray(mine["rows"], np.int64)
    kept = np.repeat(counts[:, 0] > 0, counts[:, 1])
    everyone = collectives.allgather(counts[:, :1], name="predicted rows")
    per_rank = collectives.allgather(np.array([len(counts)], np.int64), name="predicted steps")
    order = _order(everyone[:, 0], per_rank) if interleaved else None

    def join(leaf: Any) -> np.ndarray:
        if not isinstance(leaf, np.ndarray):
            raise DataError(
                f"Predictions of type {type(leaf).__name__} can't be gathered; return plain "
                "tensors."
            )
        rows = collectives.allgather(leaf[kept], name="predictions")
        return rows if order is None else rows[order]

    return keras.tree.map_structure(join, mine["outputs"])


def _order(rows: np.ndarray, steps_per_rank: np.ndarray) -> np.ndarray:
    """For each row of the input its place in the rows of rank 0, then rank 1, and so on."""
    steps = int(steps_per_rank[0])
    by_rank = rows.reshape(len(steps_per_rank), steps)
    ends = np.cumsum(by_rank.reshape(-1)).reshape(by_rank.shape)
    starts = ends - by_rank
    places = [
        np.arange(starts[rank, step], ends[rank, step])
        for step in range(steps)
        for rank in range(len(steps_per_rank))
    ]
    return np.concatenate(places) if places else np.zeros(0, np.int64)
