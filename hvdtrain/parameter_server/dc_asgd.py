"""Delay compensation (Zheng et al. 2017, arXiv 1609.08326).

A gradient g that was computed with weights from which others have moved on is corrected to what it
would be about now: g + strength * g * g * (now - then). g * g stands for the loss's second
derivatives.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvdtrain.collectives.kernels import widen
from hvdtrain.parameter_server.gradient_packing import Parts, Rows, merge_rows
from hvdtrain.parameter_server.sharding import Shard

__all__ = ["DelayCompensation"]


class DelayCompensation:
    """Keeps what each worker was sent last: one copy of the shard for each.

    float16 and bfloat16 are corrected in float32.

    Args:
        strength: The paper's lambda.
        shard: Of the variables.
    """

    def __init__(self, strength: float, shard: Shard) -> None:
        self._strength = strength
        self._shard = shard
        self._sent: dict[int, np.ndarray] = {}

    def sent(self, worker: int, weights: np.ndarray) -> None:
        """Note with which weights, a flat buffer, a worker computes its next gradient."""
        if worker not in self._sent:
            self._sent[worker] = np.empty_like(weights)
        np.copyto(self._sent[worker], weights)

    def correct(self, worker: int, parts: Parts, weights: np.ndarray) -> Parts:
        """A worker's gradients for the weights of now.

        Args:
            worker: By rank; ``sent`` was called for it.
            parts: Dense gradients are changed in place.
            weights: Those of now, a flat buffer.
        """
        before = self._sent[worker]
        dense = (replace(parts, flat=flat).dense() for flat in (parts.flat, weights, before))
        for gradient, now, then in zip(*dense):
            gradient[...] = self._corrected(gradient, now, then)
        now_all, then_all = self._shard.views(weights), self._shard.views(before)
        kinds = parts.kinds.copy()
        rows = {}
        for number, several in parts.rows.items():
            # The square of a row that comes several times is that of its sum.
            indices, values = merge_rows([Rows(several.indices, widen(several.values))])
            now, then = now_all[number][indices], then_all[number][indices]
            corrected = self._corrected(values, now, then)
            rows[number] = Rows(indices, corrected.astype(several.values.dtype, copy=False))
            kinds[number] = len(indices)
        return replace(parts, kinds=kinds, rows=rows)

    def _corrected(self, gradient: np.ndarray, now: np.ndarray, then: np.ndarray) -> np.ndarray:
        gradient = widen(gradient)
        moved = widen(now) - widen(then)
        return gradient + self._strength * gradient * gradient * moved
