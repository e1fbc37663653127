"""Metrics, logs and predictions over the samples of all ranks.

If a ``train_step`` of the user's returns something else than the results of the metrics, Keras
reports what the last step of the epoch returned. Usually each of its entries is the result of a
metric, which is known exactly over all ranks, or a value of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import DataError

__all__ = [
    "Predicted",
    "join_logs",
    "join_predictions",
    "joint_metrics",
    "metric_results",
    "recording_rows",
    "reduction_of_metric",
]


@contextmanager
def joint_metrics(model: keras.Model, collectives: Engine) -> Iterator[None]:
    """Set the model's metrics to those of all ranks within the block.

    Metrics keep sums and counts, whose sums over the ranks are exact. The average of the ranks'
    results would be wrong if one of them has fewer samples.
    """
    variables = list(model.metrics_variables)
    own = [np.asarray(variable.numpy()) for variable in variables]
    groups: dict[tuple[ReduceOp, np.dtype], list[int]] = {}
    for index, variable in enumerate(variables):
        reduction = reduction_of_metric(variable)
        if reduction is not None:
            groups.setdefault((reduction, own[index].dtype), []).append(index)
    for (op, _), indices in groups.items():
        values = [own[index] for index in indices]
        totals = collectives.grouped_allreduce(values, op, name="metrics")
        for index, total in zip(indices, totals):
            variables[index].assign(total)
    for variable, value in zip(variables, own):
        if getattr(variable, "aggregation", "sum") == "only_first_replica":
            variable.assign(collectives.broadcast(value, 0, name="metrics"))
    try:
        yield
    finally:
        for variable, value in zip(variables, own):
            variable.assign(value)


def reduction_of_metric(variable: Any) -> Literal["sum", "average"] | None:
    """Return how ranks combine a metric's variable, by its Keras ``aggregation``; None if not."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return "sum"
    return "average" if aggregation == "mean" else None


def metric_results(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the current results of the model's metrics and of those within them, by name."""
    results = {metric.name: metric.result() for metric in model.metrics}
    return {
        "/".join(map(str, path)): value
        for path, leaf in keras.tree.flatten_with_path(results)
        if (value := _as_float64(leaf)) is not None
    }


def join_logs(
    logs: Any,
    rows: int,
    own: dict[str, np.ndarray],
    joint: dict[str, np.ndarray],
    collectives: Engine,
) -> Any:
    """Return the logs of a step over all ranks; collective.

    An entry that equals the result of the same metric on each rank becomes that metric's joint
    result. Any other number or array becomes the mean over the samples of the step. Entries that
    aren't numeric, or differ in shape between ranks, keep this rank's value.

    Args:
        logs: The nested result of this rank's last step.
        rows: Samples of this rank in that step.
        own: ``metric_results`` of this rank.
        joint: ``metric_results`` of all ranks.
        collectives: Connects the ranks.
    """
    paths, leaves = zip(*keras.tree.flatten_with_path(logs)) if logs else ((), ())
    values = [_as_float64(leaf) for leaf in leaves]
    described = [
        None if value is None else [list(value.shape), _equal(value, path, own) if rows else None]
        for path, value in zip(paths, values)
    ]
    all_ranks = collectives.allgather_object([rows, described], name="logs of a step")
    joined = list(leaves)
    means: dict[int, np.ndarray] = {}
    for index, value in enumerate(values):
        entries = [entries[index] for _, entries in all_ranks]
        if value is None or any(entry is None or entry[0] != entries[0][0] for entry in entries):
            continue
        candidates = [entry[1] for entry in entries if entry[1] is not None]
        names = [n for n in candidates[0] if all(n in others for others in candidates)]
        if names:
            joined[index] = _as_scalar(joint[names[0]])
        else:
            means[index] = value * rows if rows else np.zeros_like(value)
    total = sum(rows for rows, _ in all_ranks)
    sums = collectives.grouped_allreduce(list(means.values()), "sum", name="logs of a step")
    for index, value in zip(means, sums):
        joined[index] = _as_scalar(value / total)
    return keras.tree.pack_sequence_as(logs, joined)


def _equal(value: np.ndarray, path: tuple[Any, ...], own: dict[str, np.ndarray]) -> list[str]:
    """Return the metrics with this result, those with the name of the entry first."""
    # Not exactly equal: sums may be rounded differently inside the graph of the step.
    names = [
        name
        for name, result in own.items()
        if result.shape == value.shape
        and np.allclose(result, value, rtol=1e-6, atol=0.0, equal_nan=True)
    ]
    return sorted(names, key=lambda name: name.split("/")[-1] != str(path[-1]))


def _as_float64(leaf: Any) -> np.ndarray | None:
    """Convert a number or an array of numbers; None for anything else."""
    if isinstance(leaf, (str, bytes)) or leaf is None:
        return None
    try:
        return np.asarray(keras.ops.convert_to_numpy(leaf)).astype(np.float64)
    except (TypeError, ValueError):
        return None


def _as_scalar(value: np.ndarray) -> Any:
    return float(value) if value.ndim == 0 else value


class Predicted(NamedTuple):
    """The result of a prediction step on this rank's share.

    Attributes:
        outputs: The outputs of the model.
        rows: The number of rows that count, which is all or 0, and of all rows; int64, (1, 2).
    """

    outputs: Any
    rows: Any


def recording_rows(function: Callable[[Any], Any], rows: list[Any]) -> Callable[[Any], Any]:
    """Return Keras' predict function with ``Predicted.rows`` moved from its results to ``rows``.

    Otherwise callbacks would see them, and Keras would concatenate them with the outputs.
    """

    def predict(data: Any) -> Any:
        result = function(data)
        if not isinstance(result, Predicted):
            return result
        rows.append(result.rows)
        return result.outputs

    return predict


def join_predictions(
    outputs: Any, rows: Sequence[Any], collectives: Engine, *, interleaved: bool
) -> Any:
    """Gather the predictions of all ranks.

    Args:
        outputs: Nested arrays and ragged tensors, with the same structure on all ranks.
        rows: ``Predicted.rows``, each of one step or several, in order.
        collectives: Connects the ranks.
        interleaved: Whether joint step k has step k of the input; otherwise the parts of the ranks
            follow each other.

    Returns:
        The nested outputs with the rows of all ranks, equal on every rank.

    Raises:
        DataError: An output is neither an array nor a ragged tensor.
    """
    counts = np.concatenate([np.asarray(entry, np.int64) for entry in rows])
    kept = np.repeat(counts[:, 0] > 0, counts[:, 1])
    all_counts = collectives.allgather(counts[:, :1], name="predicted rows")
    per_rank = collectives.allgather(np.array([len(counts)], np.int64), name="predicted steps")
    order = _input_order(all_counts[:, 0], per_rank) if interleaved else None

    def join(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor):
            return join_ragged(tf.ragged.boolean_mask(leaf, kept))
        if not isinstance(leaf, np.ndarray):
            raise DataError(
                f"Predictions of type {type(leaf).__name__} can't be gathered; return dense or "
                "ragged tensors."
            )
        joint = collectives.allgather(leaf[kept], name="predictions")
        return joint if order is None else joint[order]

    def join_ragged(leaf: tf.RaggedTensor) -> tf.RaggedTensor:
        # Values and row lengths of the joint tensor are those of the parts in rank order.
        values = collectives.allgather(leaf.flat_values.numpy(), name="ragged predictions")
        lengths = [
            collectives.allgather(level.numpy(), name="row lengths of predictions")
            for level in leaf.nested_row_lengths()
        ]
        joint = tf.RaggedTensor.from_nested_row_lengths(values, lengths)
        return joint if order is None else tf.gather(joint, order)

    return keras.tree.map_structure(join, outputs)


def _input_order(rows: np.ndarray, steps_per_rank: np.ndarray) -> np.ndarray:
    """Return the index of each row of the input among the rows of rank 0, then rank 1 and so on."""
    by_rank = rows.reshape(len(steps_per_rank), -1)
    ranks, steps = by_rank.shape
    ends = np.cumsum(rows).reshape(by_rank.shape)
    starts = ends - by_rank
    indices = [
        np.arange(starts[rank, step], ends[rank, step])
        for step in range(steps)
        for rank in range(ranks)
    ]
    return np.concatenate(indices) if indices else np.zeros(0, np.int64)
