"""Error feedback for compressed gradients.

A compressed gradient is sent only in part. The unsent part is added to the gradient of the next
step.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and
other Gradient Compression Schemes", arXiv 1901.09847.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp, is_floating
from hvdtrain.errors import NonFiniteError
from hvdtrain.gradients.powersgd import PowerSGD

__all__ = ["ErrorFeedback", "Kept", "KeptArray"]


class KeptArray:
    """A float32 array that is kept from step to step and saved in checkpoints. Initially zeros."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        # The array. ``assign`` replaces the array, and nothing modifies it in place.
        self.value = np.zeros(shape, np.float32)
        self.dtype = self.value.dtype

    def assign(self, value: np.ndarray) -> None:
        """Replace the array."""
        self.value = value


class Kept(NamedTuple):
    """The arrays that are kept from step to step for one variable."""

    unsent: KeptArray  # the part of this rank's gradients that was not sent yet
    state: KeptArray  # state of the compressor, which is identical on all ranks and may be empty


class ErrorFeedback:
    """Averages compressed gradients, and keeps their unsent parts for the next step."""

    def __init__(self, compressor: PowerSGD) -> None:
        self._compressor = compressor
        # The key is the variable's id. An entry is removed when its variable is deleted.
        self._kept: dict[int, tuple[weakref.ref[Any], Kept]] = {}

    def takes(self, variable: Any, dtype: np.dtype) -> bool:
        """Return whether dense gradients of a variable with this dtype are compressed.

        ``variable`` may also be a tensor or a name, whose gradients are not compressed.
        """
        if not hasattr(variable, "assign") or not is_floating(dtype):
            return False
        shape = variable.shape
        known = shape.rank is not None if hasattr(shape, "rank") else True
        return known and None not in tuple(shape) and self._compressor.takes(tuple(shape))

    def keep(self, variable: Any) -> Kept:
        """Return the arrays that are kept for a variable. They are initially zeros."""
        key = id(variable)
        if key not in self._kept:
            shape = tuple(variable.shape)
            state = KeptArray(self._compressor.state_shape(shape))
            reference = weakref.ref(variable, lambda _: self._kept.pop(key))
            self._kept[key] = reference, Kept(KeptArray(shape), state)
        return self._kept[key][1]

    def arrays(self, variables: Sequence[Any]) -> dict[str, KeptArray]:
        """Return the stored arrays of the variables, by names such as ``unsent/0003``."""
        arrays = {}
        for number, variable in enumerate(variables):
            if id(variable) in self._kept:
                unsent, state = self.keep(variable)
                arrays[f"unsent/{number:04d}"] = unsent
                if state.value.size:
                    # The state is not valid for a different PowerSGD rank, so the name contains its
                    # shape.
                    shape = "x".join(map(str, state.value.shape))
                    arrays[f"factors/{number:04d}/{shape}"] = state
        return arrays

    def average(
        self,
        collectives: Engine,
        kept: Sequence[Kept],
        gradients: Sequence[np.ndarray],
        *,
        op: ReduceOp,
        weight: float,
        require_finite: bool,
        name: str,
    ) -> tuple[list[np.ndarray], float]:
        """Average gradients after adding the unsent parts of earlier gradients.

        All ranks must call this. ``kept`` contains, for each gradient, the arrays that are kept for
        its variable.

        Returns:
            Two values: the averages, and the mean weight of the ranks that contributed to them.

        Raises:
            NonFiniteError: If an average contains NaN or infinity. The kept arrays don't change
                then.
        """
        arrays = [
            entry.unsent.value + gradient.astype(np.float32, copy=False)
            for entry, gradient in zip(kept, gradients)
        ]
        states = [entry.state.value for entry in kept]
        sent = self._compressor.average(collectives, arrays, states, weight=weight, name=name)
        factor = np.float32(len(collectives.contributed) if op == "sum" else 1)
        with np.errstate(over="ignore", invalid="ignore"):
            results = [
                np.asarray(mean * factor).astype(gradient.dtype, copy=False)
                for mean, gradient in zip(sent.means, gradients)
            ]
        finite = [bool(np.isfinite(result).all()) for result in results]
        if require_finite and not all(finite):
            raise NonFiniteError(f"The result of {name} contains NaN or infinity.")
        # Don't keep NaN, because all later averages would then be NaN too.
        for entry, unsent, state, is_finite in zip(kept, sent.unsent, sent.states, finite):
            if is_finite:
                entry.unsent.assign(unsent)
                entry.state.assign(state)
        return results, sent.weight
