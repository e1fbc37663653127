"""Exact metrics over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.interface import Collectives, ReduceOp

__all__ = ["joint_metrics", "reduction_of_metric"]


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
        op = reduction_of_metric(variable)
        if op is not None:
            groups.setdefault((op, own[index].dtype), []).append(index)
    for (op, _), indices in groups.items():
        values = [own[index] for index in indices]
        totals = collectives.grouped_allreduce(values, op, name="metrics")
        for index, total in zip(indices, totals):
            variables[index].assign(total)
    try:
        yield
    finally:
        for variable, value in zip(variables, own):
            variable.assign(value)


def reduction_of_metric(variable: Any) -> ReduceOp | None:
    """How a metric's variable adds up, by what Keras notes for its own distribution."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return "sum"
    return "average" if aggregation == "mean" else None
