"""Error feedback: what was not sent of a gradient is added to that of the next step.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and
other Gradient Compression Schemes", arXiv 1901.09847.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import NonFiniteError
from hvdtrain.gradients.powersgd import PowerSGD

__all__ = ["ErrorFeedback", "Kept", "KeptArray"]


class KeptArray:
    """A float32 array that goes from step to step, as checkpoints take variables; zeros at first.

    Attributes:
        value: The array; another one takes its place, and it isn't written to.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.value = np.zeros(shape, np.float32)
        self.dtype = self.value.dtype

    def assign(self, value: np.ndarray) -> None:
        """Keep this one from now on."""
        self.value = value


class Kept(NamedTuple):
    """The arrays that are kept for one variable.

    Attributes:
        unsent: What this rank has not sent of its gradients.
        state: What the compressor keeps, alike on all ranks; empty for nothing.
    """

    unsent: KeptArray
    state: KeptArray


class ErrorFeedback:
    """Averages gradients of which a part is sent, and keeps the rest.

    Args:
        compressor: Chooses that part.
    """

    def __init__(self, compressor: PowerSGD) -> None:
        self._compressor = compressor
        # By what identifies a variable as long as it is there; with it goes what is kept.
        self._kept: dict[int, tuple[weakref.ref[Any], Kept]] = {}

    def takes(self, variable: Any, gradient: Any) -> bool:
        """Whether not all of such a gradient is sent: it must be dense, and of a variable."""
        return (
            isinstance(variable, (tf.Variable, keras.Variable))
            and isinstance(gradient, tf.Tensor)
            and gradient.dtype.is_floating
            and tf.TensorShape(variable.shape).is_fully_defined()
            and self._compressor.takes(tuple(variable.shape))
        )

    def keep(self, variable: Any) -> Kept:
        """Return what is kept for a variable; zeros from now on if there is nothing yet."""
        key = id(variable)
        if key not in self._kept:
            shape = tuple(variable.shape)
            state = KeptArray(self._compressor.state_shape(shape))
            there = weakref.ref(variable, lambda _: self._kept.pop(key))
            self._kept[key] = there, Kept(KeptArray(shape), state)
        return self._kept[key][1]

    def arrays(self, variables: Sequence[Any]) -> dict[str, KeptArray]:
        """All that is kept for some variables, by kind and the number of the variable."""
        found = {}
        for number, variable in enumerate(variables):
            if id(variable) in self._kept:
                unsent, state = self.keep(variable)
                found[f"unsent/{number:04d}"] = unsent
                if state.value.size:
                    # That of another rank is of no use.
                    shape = "x".join(map(str, state.value.shape))
                    found[f"factors/{number:04d}/{shape}"] = state
        return found

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
        """Average what is sent of gradients and of what was left of earlier ones; collective.

        Args:
            collectives: The engine of the ranks.
            kept: What ``keep`` returned for each gradient's variable.
            gradients: Those of this rank.
            op: ``average``, or ``sum`` for as many times that as there are ranks.
            weight: What this rank counts for.
            require_finite: Whether NaN and infinity are errors.
            name: Stands in errors.

        Returns:
            The averages, and the mean weight of the ranks that are in them.

        Raises:
            NonFiniteError: An average holds NaN or infinity, on every rank; nothing has changed.
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
            raise NonFiniteError(f"The result of {name} holds NaN or infinity.")
        # A step that is not finite leaves what is kept as it was: NaN would never go away.
        for entry, unsent, state, is_finite in zip(kept, sent.unsent, sent.states, finite):
            if is_finite:
                entry.unsent.assign(unsent)
                entry.state.assign(state)
        return results, sent.weight
