"""Metrics, and what steps of the user's own return, as one process on the joint batches has them.

Keras shows what the last step of an epoch returned where that is not just the model's metrics. In
it each entry is the result of a metric as a rule, which is known exactly, or belongs to the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import keras
import numpy as np

from hvdtrain.collectives.interface import Collectives, ReduceOp

__all__ = ["join_logs", "joint_metrics", "reduction_of_metric", "results_of_metrics"]


@contextmanager
def joint_metrics(model: keras.Model, collectives: Collectives) -> Iterator[None]:
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
    collectives: Collectives,
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
