"""Metrics, logs and predictions over the samples of all ranks.

A custom ``train_step`` may return the results of the model's metrics and other values. Keras
reports the values that the last step of the epoch returned. An entry that equals a metric's result
is replaced by the result of this metric over all ranks, which is exact. Any other entry is taken as
a value of the batch, and averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import DataError
from hvdtrain.trainer.variables import array_of

__all__ = [
    "join_logs",
    "join_predictions",
    "joint_metrics",
    "metric_results",
    "reduction_of_metric",
    "result_array",
]


@contextmanager
def joint_metrics(model: keras.Model, collectives: Engine) -> Iterator[None]:
    """Set the model's metrics to their state over all ranks within the ``with`` block.

    Metrics contain sums and counts. These are added over the ranks, so the results are exact.
    Averaging the results of the ranks would be wrong if one rank had fewer samples than the other
    ranks.
    """
    variables = list(model.metrics_variables)
    own = [np.array(array_of(variable)) for variable in variables]
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
    """Return how the values of a metric's variable are combined over ranks, such as ``"sum"``.

    The variable's attribute ``aggregation`` decides. The result is None if each rank keeps its own
    value.
    """
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return "sum"
    return "average" if aggregation == "mean" else None


def result_array(result: Any) -> Any:
    """Return a metric's result as a copy, because a variable changes, and others unchanged."""
    value = result.value if isinstance(result, keras.Variable) else result
    if not keras.ops.is_tensor(value):
        return value
    try:
        return np.array(keras.ops.convert_to_numpy(value))
    except NotImplementedError:  # a tensor of a finished graph, which Keras ignores
        return value


def metric_results(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the current results of the model's metrics, including nested ones, by name."""
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
    """Combine the values that a step of each rank returned. This rank's step had ``rows`` samples.

    If an entry equals the result of the same metric on every rank, it is replaced by the result of
    that metric in ``joint``. ``own`` contains the results of the metrics on this rank. Any other
    number or array becomes the mean over the samples of the step. An entry that isn't numeric, or
    whose shape differs between ranks, keeps this rank's value.
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
    """Return the names of the metrics whose result equals the value of an entry.

    A metric with the same name as the entry comes first. The comparison has a tolerance, because
    the graph of the step may round sums differently.
    """
    names = [
        name
        for name, result in own.items()
        if result.shape == value.shape
        and np.allclose(result, value, rtol=1e-6, atol=0.0, equal_nan=True)
    ]
    return sorted(names, key=lambda name: name.split("/")[-1] != str(path[-1]))


def _as_float64(leaf: Any) -> np.ndarray | None:
    """Convert a number or an array of numbers to float64. Return None for other values."""
    if isinstance(leaf, (str, bytes)) or leaf is None:
        return None
    try:
        return np.asarray(keras.ops.convert_to_numpy(leaf)).astype(np.float64)
    except (TypeError, ValueError):
        return None


def _as_scalar(value: np.ndarray) -> Any:
    return float(value) if value.ndim == 0 else value


def join_predictions(
    outputs: Any, rows: Sequence[Any], collectives: Engine, *, interleaved: bool
) -> Any:
    """Return the predictions of all ranks, as nested arrays and ragged tensors.

    ``rows`` contains ``Predicted.rows`` of each step on this rank. If ``interleaved`` is true, the
    ranks took turns: with two ranks, rank 0 took the batches 0, 2, 4, and so on. Otherwise each
    rank took one contiguous part of the input.

    Raises:
        DataError: If an output is neither an array nor a ragged tensor.
    """
    counts = np.concatenate([np.asarray(entry, np.int64) for entry in rows])
    kept = np.repeat(counts[:, 0] > 0, counts[:, 1])
    all_counts = collectives.allgather(counts[:, 0], name="predicted rows")
    order = None
    if interleaved:
        # The rows are sorted by rank and then by step. Sort them by step and then by rank.
        steps = np.tile(np.arange(len(counts)), len(all_counts) // len(counts))
        order = np.argsort(np.repeat(steps, all_counts), kind="stable")

    def gather(array: np.ndarray, name: str) -> np.ndarray:
        joint: np.ndarray = collectives.allgather(array, name=name)
        return joint

    def join(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            joint = gather(leaf[kept], "predictions")
            return joint if order is None else joint[order]
        if type(leaf).__name__ == "RaggedTensor":
            from hvdtrain.trainer.backends.tensorflow.ragged import join_ragged

            return join_ragged(leaf, kept, order, gather)
        raise DataError(
            f"Predictions of type {type(leaf).__name__} can't be gathered; return dense or ragged "
            "tensors."
        )

    return keras.tree.map_structure(join, outputs)
