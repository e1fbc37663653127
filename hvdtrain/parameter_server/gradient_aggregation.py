"""The gradients of several workers on their way to one update."""

from __future__ import annotations

import numpy as np

from hvdtrain.collectives.kernels import widen
from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.gradient_packing import Parts, Rows, merge_rows

__all__ = ["GradientAggregation"]


class GradientAggregation:
    """Adds gradients up as they come, so that one buffer is enough for all workers.

    float16 and bfloat16 are summed in float32.
    """

    def __init__(self) -> None:
        self._first: Parts | None = None  # says what there is, and has room for the mean
        self._dense: list[np.ndarray] = []
        self._rows: dict[int, Rows] = {}
        self._weight = 0.0

    def add(self, parts: Parts, weight: float) -> None:
        """Add one worker's gradients.

        Args:
            parts: Overwritten.
            weight: What they count for.

        Raises:
            MismatchError: They are of other variables than those before.
        """
        first = self._first
        if first is None:
            self._first = parts
            self._dense = [_weighted(values, weight).copy() for values in parts.dense()]
            self._rows = {n: merge_rows([_weighted_rows(r, weight)]) for n, r in parts.rows.items()}
        elif first.missing != parts.missing or first.rows.keys() != parts.rows.keys():
            raise MismatchError(
                "Workers have gradients for different variables, or sparse ones where others have "
                "dense ones. All ranks must train the same variables with the same loss."
            )
        else:
            for total, values in zip(self._dense, parts.dense()):
                total += _weighted(values, weight)
            for number, rows in parts.rows.items():
                both = [self._rows[number], _weighted_rows(rows, weight)]
                self._rows[number] = merge_rows(both)
        self._weight += weight

    def mean(self) -> Parts | None:
        """The weighted mean, and begin anew; None where nothing was added.

        It lies in the buffer of the gradients that were added first.
        """
        parts, self._first = self._first, None
        weight, self._weight = self._weight, 0.0
        if parts is None:
            return None
        for values, total in zip(parts.dense(), self._dense):
            np.divide(total, weight, out=values, casting="unsafe")
        kinds = parts.kinds.copy()
        rows = {}
        for number, (indices, total) in self._rows.items():
            dtype = parts.rows[number].values.dtype
            rows[number] = Rows(indices, np.divide(total, weight).astype(dtype, copy=False))
            kinds[number] = len(indices)
        self._dense, self._rows = [], {}
        return Parts(shard=parts.shard, kinds=kinds, flat=parts.flat, rows=rows)


def _weighted(values: np.ndarray, weight: float) -> np.ndarray:
    """In the type of sums; in place where that is the type."""
    wide = widen(values)
    return np.multiply(wide, weight, out=wide)


def _weighted_rows(rows: Rows, weight: float) -> Rows:
    return Rows(rows.indices, _weighted(rows.values, weight))
