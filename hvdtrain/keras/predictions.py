"""Putting the predictions of all ranks back into the order of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import DataError

__all__ = ["Predicted", "join_predictions", "noting_rows"]


class Predicted(NamedTuple):
    """The result of a prediction step on this rank's share.

    Attributes:
        outputs: The model's.
        rows: int64, (1, 2): how many rows count, all or none, and how many there are.
    """

    outputs: Any
    rows: Any


def noting_rows(function: Callable[[Any], Any], rows: list[Any]) -> Callable[[Any], Any]:
    """Keras' predict function, without what is not for the user: that is added to ``rows``.

    Keras would join it step by step, as it does the outputs, and callbacks would see it.
    """

    def predict(data: Any) -> Any:
        told = function(data)
        if not isinstance(told, Predicted):
            return told
        rows.append(told.rows)
        return told.outputs

    return predict


def join_predictions(
    mine: Any, rows: Sequence[Any], collectives: Collectives, *, interleaved: bool
) -> Any:
    """Gather what each rank predicted.

    Args:
        mine: Structure of arrays and ragged tensors, of the same kinds on all ranks.
        rows: The rows that ``Predicted`` notes, of one step or several, in their order.
        interleaved: Whether step k of all ranks together is step k of the input; otherwise the
            parts simply follow each other in rank order.

    Returns:
        The structure, with all rows of all ranks, alike on every rank.
    """
    counts = np.concatenate([np.asarray(entry, np.int64) for entry in rows])
    kept = np.repeat(counts[:, 0] > 0, counts[:, 1])
    everyone = collectives.allgather(counts[:, :1], name="predicted rows")
    per_rank = collectives.allgather(np.array([len(counts)], np.int64), name="predicted steps")
    order = _order(everyone[:, 0], per_rank) if interleaved else None

    def join(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor):
            return join_ragged(tf.ragged.boolean_mask(leaf, kept))
        if not isinstance(leaf, np.ndarray):
            raise DataError(
                f"Predictions of type {type(leaf).__name__} can't be gathered; return plain "
                "tensors."
            )
        joint = collectives.allgather(leaf[kept], name="predictions")
        return joint if order is None else joint[order]

    def join_ragged(leaf: tf.RaggedTensor) -> tf.RaggedTensor:
        # The parts of a ragged tensor, each joined in rank order, are those of the joint tensor.
        values = collectives.allgather(leaf.flat_values.numpy(), name="ragged predictions")
        lengths = [
            collectives.allgather(level.numpy(), name="row lengths of predictions")
            for level in leaf.nested_row_lengths()
        ]
        joint = tf.RaggedTensor.from_nested_row_lengths(values, lengths)
        return joint if order is None else tf.gather(joint, order)

    return keras.tree.map_structure(join, mine)


def _order(rows: np.ndarray, steps_per_rank: np.ndarray) -> np.ndarray:
    """Return for each row of the input its place in the rows of rank 0, then rank 1, and so on."""
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
