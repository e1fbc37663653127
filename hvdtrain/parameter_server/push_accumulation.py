"""Gradients of several steps of a worker on their way to one push.

In Downpour (Dean et al. 2012, "Large Scale Distributed Deep Networks") a worker adds up the
gradients of some steps, in each of which it goes on by itself, and sends their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.kernels import accumulator_dtype, widen
from hvdtrain.parameter_server.gradient_packing import Gradient, Rows, merge_rows

__all__ = ["AccumulatedPush"]


class AccumulatedPush:
    """What a worker has still to send.

    float16 and bfloat16 are summed in float32.

    Args:
        steps: How many make one push.
    """

    def __init__(self, steps: int) -> None:
        self._wanted = steps
        self._dtypes: list[np.dtype | None] = []  # of all variables
        # By the variable's number.
        self._dense: dict[int, np.ndarray] = {}
        self._rows: dict[int, Rows] = {}
        self.steps = 0
        """How many there were since ``take``."""

    @property
    def complete(self) -> bool:
        """Whether it is time to send."""
        return self.steps >= self._wanted

    def add(self, gradients: Sequence[Gradient] | None) -> None:
        """Add a step's gradients of all variables; they are copied. None where it has none."""
        self.steps += 1
        if gradients is None:
            return
        self._dtypes = self._dtypes or [None] * len(gradients)
        for number, gradient in enumerate(gradients):
            if isinstance(gradient, Rows):
                self._dtypes[number] = gradient.values.dtype
                self._add_rows(number, gradient)
            elif gradient is not None:
                self._dtypes[number] = gradient.dtype
                self._add_dense(number, gradient)

    def take(self) -> list[Gradient] | None:
        """The sums, None for variables without a gradient in any step; and begin anew.

        None where no step had gradients.
        """
        dtypes, dense, rows = self._dtypes, self._dense, self._rows
        self._dtypes, self._dense, self._rows = [], {}, {}
        self.steps = 0
        sums: list[Gradient] = [None] * len(dtypes)
        for number, values in dense.items():
            sums[number] = values.astype(dtypes[number], copy=False)
        for number, (indices, values) in rows.items():
            sums[number] = Rows(indices, values.astype(dtypes[number], copy=False))
        return sums or None

    def _add_dense(self, number: int, gradient: np.ndarray) -> None:
        if number in self._dense:
            self._dense[number] += gradient
        else:
            self._dense[number] = gradient.astype(accumulator_dtype(gradient.dtype))

    def _add_rows(self, number: int, rows: Rows) -> None:
        several = [Rows(rows.indices, widen(rows.values))]
        if number in self._rows:
            several.append(self._rows[number])
        self._rows[number] = merge_rows(several)
