"""The ranks whose gradients went into each step, and means where some were lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

__all__ = ["Contributions", "scale_without_lost", "without_lost"]


class Contributions:
    """The ranks that had a part in each step.

    Filled while steps run, perhaps several in one go; read when Python has its turn again.

    Members are ranks by their first numbers; see ``hvdtrain.collectives.engine.Engine``.
    """

    def __init__(self) -> None:
        self._steps: list[frozenset[int] | None] = []

    def begin_step(self) -> None:
        """Begin another step, to which what is added from now on belongs."""
        self._steps.append(None)

    def add(self, members: Iterable[int]) -> None:
        """Note that some gradients of the step in work were averaged over these members."""
        if self._steps:
            before = self._steps[-1]
            self._steps[-1] = frozenset(members) if before is None else before & set(members)

    def take(self) -> list[frozenset[int] | None]:
        """Return, for each step since the last call, who had a part in all of its gradients.

        None for a step that averaged none, as before the last of several that are accumulated.
        """
        steps, self._steps = self._steps, []
        return steps


def without_lost(
    averages: Sequence[np.ndarray], mean_weight: float, dtype: tf.DType
) -> list[np.ndarray]:
    """Make means of weighted gradients those over the ranks that had a part in them."""
    scale = scale_without_lost(mean_weight, dtype)
    if scale == 1.0:
        return list(averages)
    return [average * average.dtype.type(scale) for average in averages]


def scale_without_lost(mean_weight: float, dtype: tf.DType) -> float:
    """Return the factor from a mean of weighted gradients to one over the ranks with a part in it.

    Rounding alone is not made up for: it would change what no rank was missing from.
    """
    epsilon = 2.0**-7 if dtype == tf.bfloat16 else float(np.finfo(dtype.as_numpy_dtype).eps)
    if mean_weight <= 0 or abs(mean_weight - 1.0) <= 8 * epsilon:
        return 1.0
    return 1.0 / mean_weight
