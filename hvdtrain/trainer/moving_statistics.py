"""Statistics that layers keep of their batches, such as the moving mean of BatchNormalization.

One process would update a statistic to m = a m + (1 - a) sum(n_r x_r) / n. Here a is the momentum,
n is the number of rows of all ranks, and x_r is the mean or variance of the n_r rows of rank r. N
ranks get the same result in two steps. Rank r updates its own statistic m_r with the formulas
below. The statistic of all ranks is then the average of all m_r, weighted by c_r.

    w_r = N n_r / n
    c_r = a c_r + (1 - a) w_r, initially 1
    m_r = m_r + (w_r / c_r) (1 - a) (x_r - m_r)

If all ranks have equally many rows, w_r and c_r are 1. A rank without rows changes no statistic.
For layers other than BatchNormalization the momentum is unknown, so a rank with rows updates the
statistics of these layers as the layers themselves do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from hvdtrain.collectives.engine import Engine
from hvdtrain.private_api.keras import flatten_layers, own_non_trainable_variables, set_untracked
from hvdtrain.trainer.model_parts import layer_statistics
from hvdtrain.trainer.step_variables import step_variable
from hvdtrain.trainer.variables import array_of, assign, dtype_of

__all__ = ["MovingStatistics", "StepRates", "row_weights_of", "steps_with_rows_of"]

_ROW_WEIGHTS = "_hvdtrain_row_weights"
_STEPS = "_hvdtrain_steps_with_rows"
_DEFAULT_MOMENTUM = 0.99


class StepRates(NamedTuple):
    """How the statistics change in one step. The values are tensors or NumPy arrays."""

    has_rows: Any  # bool, whether this rank has rows
    even: Any  # bool, whether the layers' own updates are exact
    rates: Any  # float32, w_r / c_r for each momentum


class MovingStatistics:
    """The statistics that the layers of a model keep of their batches.

    Args:
        model: A built model.
        synchronized: Layers that already compute their statistics over the batches of all ranks.
    """

    def __init__(self, model: keras.Model, synchronized: Sequence[Any] = ()) -> None:
        self._model = model
        statistics = layer_statistics(model)
        # Ids of variables that can't be averaged. Their values are taken from the rank that made
        # the most steps.
        self._complete = {
            id(v) for v in statistics if not keras.backend.is_float_dtype(dtype_of(v).name)
        }
        known: dict[int, float] = {}
        for layer in flatten_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                variables = own_non_trainable_variables(layer)
                known.update({id(v): float(layer.momentum) for v in variables})
                if layer in synchronized:
                    self._complete.update(map(id, variables))
        self._variables = [v for v in statistics if id(v) not in self._complete]
        self._exact = [id(v) in known for v in self._variables]
        momenta = [known.get(id(v), _DEFAULT_MOMENTUM) for v in self._variables]
        self._momenta = sorted(set(momenta))
        self._places = {id(v): self._momenta.index(a) for v, a in zip(self._variables, momenta)}
        # Stores c_r - 1 for each momentum instead of c_r, because a checkpoint without these values
        # restores zeros.
        zeros = np.zeros(len(self._momenta), np.float32)
        self._surplus = step_variable(zeros, dtype="float32", name="row_weights")
        set_untracked(model, _ROW_WEIGHTS, [self._surplus] if self._variables else [])
        # Number of steps with rows since the last average. The rank with the most of them provides
        # the values of the variables in _complete.
        self._steps = step_variable(0, dtype="int64", name="steps_with_rows")
        set_untracked(model, _STEPS, [self._steps] if self._complete else [])

    @property
    def variables(self) -> list[Any]:
        """The variables that are weighted by rows. Other statistics are copied from one rank."""
        return list(self._variables)

    def begin_step(self, weight: float) -> StepRates:
        """Update the weights c_r before a step of torch or JAX, and return the step's rates.

        ``weight`` is w_r, the weight of this rank's batch.
        """
        if self._complete and weight > 0:
            self._steps.assign(self._steps.value + 1)
        surplus = self._surplus.value
        even = abs(weight - 1.0) < 1e-6 and not surplus.any()
        if not even:
            momenta = np.asarray(self._momenta, np.float32)
            surplus = momenta * surplus + (1 - momenta) * np.float32(weight - 1.0)
            self._surplus.assign(surplus)
        rates = np.float32(weight) / np.maximum(1 + surplus, np.float32(1e-30))
        return StepRates(np.bool_(weight > 0), np.bool_(even), rates)

    def moved(
        self, before: Sequence[Any], after: Sequence[Any], step: StepRates, *, select: bool = True
    ) -> list[Any]:
        """Return the values of ``variables`` after a step.

        Args:
            before: Their values before the step.
            after: Their values after the layers have updated them with this rank's batch.
            step: The rates of the step.
            select: Whether ``step.even`` may be true.
        """
        values = []
        for variable, old, new, exact in zip(self._variables, before, after, self._exact):
            if exact:
                rate = step.rates[self._places[id(variable)]]
                moved = old + ops.cast(rate, old.dtype) * (new - old)
                new = ops.where(step.even, new, moved) if select else moved
            values.append(ops.where(step.has_rows, new, old))
        return values

    @contextmanager
    def weighted_by(self, weight: Any, *, select: bool = False) -> Iterator[None]:
        """Weight the statistics of a step of TensorFlow in the ``with`` block by ``weight``.

        ``weight`` is w_r, the weight of this rank's batch. If ``select`` is true, the update of the
        statistics contains no ``tf.cond``, because XLA can't fuse other operations with a
        ``tf.cond``.
        """
        if self._complete:
            self._steps.assign_add(ops.cast(weight > 0, "int64"))
        if not self._variables:
            yield
            return
        before = [ops.copy(v) for v in self._variables]
        yield
        even = ops.logical_and(ops.abs(weight - 1.0) < 1e-6, ops.all(self._surplus.value == 0.0))
        if select:
            self._move(before, ops.where(even, 1.0, weight), even=even)
        else:
            ops.cond(even, lambda: None, lambda: self._move(before, weight))

    def skip(self) -> None:
        """Update the weights c_r for a step of TensorFlow in which this rank has no rows."""
        if self._variables:
            self._count(0.0)

    def _count(self, weight: Any) -> Any:
        """Update the weight c_r for each momentum, and return c_r - 1."""
        momenta = np.asarray(self._momenta, np.float32)
        surplus = momenta * self._surplus.value + (1.0 - momenta) * (weight - 1.0)
        self._surplus.assign(surplus)
        return surplus

    def _move(self, before: Sequence[Any], weight: Any, even: Any = None) -> None:
        rates = weight / ops.maximum(1.0 + self._count(weight), 1e-30)
        step = StepRates(weight > 0, even, rates)
        after = [ops.convert_to_tensor(v) for v in self._variables]
        for variable, value in zip(
            self._variables, self.moved(before, after, step, select=even is not None)
        ):
            variable.assign(value)

    def average(self, collectives: Engine, more: Sequence[Any] = ()) -> None:
        """Average the statistics, and the variables ``more``, over all ranks.

        All ranks must call this. Integers, and statistics that layers synchronize themselves, are
        copied from the rank with the most steps.
        """
        if collectives.size == 1:
            return
        root = 0
        if self._complete:
            steps = collectives.allgather(self._steps.numpy()[np.newaxis], name="steps with rows")
            root = int(steps.argmax())
            self._steps.assign(0)
        weights = 1.0 + np.asarray(self._surplus.numpy(), np.float64)
        averaged, values, scales = [], [], []
        for variable in [*layer_statistics(self._model), *more]:
            value = array_of(variable)
            if id(variable) in self._complete:
                name = "layer statistics"
                assign(variable, collectives.broadcast(value, root, name=name, replicated=True))
                continue
            place = self._places.get(id(variable))
            scales.append(1.0 if place is None else weights[place])
            # In float64 the mean of equal numbers is exact for any number of ranks.
            values.append(value.astype(np.float64) * scales[-1])
            averaged.append(variable)
        if not averaged:
            return
        *means, mean_scales = collectives.grouped_allreduce(
            [*values, np.array(scales)], "average", name="layer statistics"
        )
        for variable, mean, scale in zip(averaged, means, mean_scales):
            assign(variable, mean / scale if scale > 0 else mean)
        self._surplus.assign(np.zeros_like(weights, np.float32))


def row_weights_of(model: keras.Model) -> list[Any]:
    """Return the variables that hold this rank's weight in the average of the statistics."""
    return list(getattr(model, _ROW_WEIGHTS, []))


def steps_with_rows_of(model: keras.Model) -> list[Any]:
    """Return the variable that counts the steps in which this rank had rows of the batch.

    The result is a list, which is empty if no such variable is needed.
    """
    return list(getattr(model, _STEPS, []))
