"""Metrics, logs and predictions of all ranks."""

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
    "noting_rows",
    "reduction_of_metric",
    "results_of_metrics",
]


@contextmanager
def joint_metrics(model: keras.Model, collectives: Engine) -> Iterator[None]:
    """Within the block the metrics hold what all ranks have seen; afterwards their own part again.

    Metrics keep sums and counts, and those add up exactly; averaging the ranks' results would be
    wrong as soon as one has fewer samples.
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
    """Return how a metric's variable adds up, as Keras notes for distributions; None for not."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return "sum"
    return "average" if aggregation == "mean" else None


def results_of_metrics(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the present results of the model's metrics, those within others too, by name."""
    results = {metric.name: metric.result() for metric in model.metrics}
    return {
        "/".join(map(str, path)): value
        for path, leaf in keras.tree.flatten_with_path(results)
        if (value := _numbers(leaf)) is not None
    }


def join_logs(
    logs: Any,
    rows: int,
    own: dict[str, np.ndarray],
    joint: dict[str, np.ndarray],
    collectives: Engine,
) -> Any:
    """The logs of a step over all ranks; collective.

    What is equal to the result of one metric on each rank is taken for it. Anything else is the
    mean over the samples of the step, and so are arrays, entry by entry. What is no number, or has
    another shape on each rank, stays this rank's own.

    Args:
        logs: Numbers and arrays, nested, as this rank's last step returned them.
        rows: Samples of this rank in that step.
        own: ``results_of_metrics`` on this rank.
        joint: The same over all ranks.
    """
    paths, leaves = zip(*keras.tree.flatten_with_path(logs)) if logs else ((), ())
    values = [_numbers(leaf) for leaf in leaves]
    seen = [
        None if value is None else [list(value.shape), _alike(value, path, own) if rows else None]
        for path, value in zip(paths, values)
    ]
    everyone = collectives.allgather_object([rows, seen], name="logs of a step")
    joined = list(leaves)
    means: dict[int, np.ndarray] = {}
    for index, value in enumerate(values):
        told = [theirs[index] for _, theirs in everyone]
        if value is None or any(entry is None or entry[0] != told[0][0] for entry in told):
            continue
        from_metrics = [entry[1] for entry in told if entry[1] is not None]
        agreed = [n for n in from_metrics[0] if all(n in names for names in from_metrics)]
        if agreed:
            joined[index] = _plain(joint[agreed[0]])
        else:
            means[index] = value * rows if rows else np.zeros_like(value)
    total = sum(rows for rows, _ in everyone)
    sums = collectives.grouped_allreduce(list(means.values()), "sum", name="logs of a step")
    for index, value in zip(means, sums):
        joined[index] = _plain(value / total)
    return keras.tree.pack_sequence_as(logs, joined)


def _alike(value: np.ndarray, path: tuple[Any, ...], own: dict[str, np.ndarray]) -> list[str]:
    """The metrics that say the same; those first that have the same name."""
    # In the graph of the step and outside of it sums may be rounded otherwise.
    found = [
        name
        for name, result in own.items()
        if result.shape == value.shape
        and np.allclose(result, value, rtol=1e-6, atol=0.0, equal_nan=True)
    ]
    return sorted(found, key=lambda name: name.split("/")[-1] != str(path[-1]))


def _numbers(leaf: Any) -> np.ndarray | None:
    """Convert to float64; None for what is no number and no array of numbers."""
    if isinstance(leaf, (str, bytes)) or leaf is None:
        return None
    try:
        return np.asarray(keras.ops.convert_to_numpy(leaf)).astype(np.float64)
    except (TypeError, ValueError):
        return None


def _plain(value: np.ndarray) -> Any:
    return float(value) if value.ndim == 0 else value


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
    mine: Any, rows: Sequence[Any], collectives: Engine, *, interleaved: bool
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
