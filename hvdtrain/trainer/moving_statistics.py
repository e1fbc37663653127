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
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.private_api.keras import flatten_layers, own_non_trainable_variables, set_untracked
from hvdtrain.trainer.model_parts import layer_statistics

__all__ = ["MovingStatistics", "row_weights_of", "steps_with_rows_of"]

_ROW_WEIGHTS = "_hvdtrain_row_weights"
_STEPS = "_hvdtrain_steps_with_rows"
_DEFAULT_MOMENTUM = 0.99


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
        self._complete = {id(v) for v in statistics if not tf.as_dtype(v.dtype).is_floating}
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
        self._surplus = keras.Variable(
            np.zeros(len(self._momenta), np.float32), trainable=False, name="row_weights"
        )
        set_untracked(model, _ROW_WEIGHTS, [self._surplus] if self._variables else [])
        # Number of steps with rows since the last average. The rank with the most of them provides
        # the values of the variables in _complete.
        self._steps = keras.Variable(0, dtype="int64", trainable=False, name="steps_with_rows")
        set_untracked(model, _STEPS, [self._steps] if self._complete else [])

    @contextmanager
    def weighted_by(self, weight: tf.Tensor, *, select: bool = False) -> Iterator[None]:
        """Weight the statistics of the step in the ``with`` block by ``weight``.

        ``weight`` is w_r, the weight of this rank's batch. If ``select`` is true, the update of the
        statistics contains no ``tf.cond``, because XLA can't fuse other operations with a
        ``tf.cond``.
        """
        if self._complete:
            self._steps.assign_add(tf.cast(weight > 0, tf.int64))
        if not self._variables:
            yield
            return
        before = [tf.identity(tf.convert_to_tensor(v)) for v in self._variables]
        yield
        even = (tf.abs(weight - 1.0) < 1e-6) & tf.reduce_all(tf.equal(self._surplus.value, 0.0))
        if select:
            self._move(before, tf.where(even, 1.0, weight), unchanged=even)
        else:
            tf.cond(even, lambda: None, lambda: self._move(before, weight))

    def skip(self) -> None:
        """Update the weights c_r for a step in which this rank has no rows."""
        if self._variables:
            self._count(tf.constant(0.0))

    def _count(self, weight: tf.Tensor) -> tf.Tensor:
        """Update the weight c_r for each momentum, and return c_r - 1."""
        momenta = tf.constant(self._momenta, tf.float32)
        surplus = momenta * self._surplus.value + (1.0 - momenta) * (weight - 1.0)
        self._surplus.assign(surplus)
        return surplus

    def _move(
        self, before: Sequence[tf.Tensor], weight: tf.Tensor, unchanged: tf.Tensor | None = None
    ) -> None:
        surplus = self._count(weight)
        for variable, old, exact in zip(self._variables, before, self._exact):
            new = tf.convert_to_tensor(variable)
            if exact:
                rate = weight / tf.maximum(1.0 + surplus[self._places[id(variable)]], 1e-30)
                moved = old + tf.cast(rate, old.dtype) * (new - old)
                new = moved if unchanged is None else tf.where(unchanged, new, moved)
            variable.assign(tf.where(weight > 0, new, old))

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
            value = np.asarray(variable.numpy())
            if id(variable) in self._complete:
                variable.assign(
                    collectives.broadcast(value, root, name="layer statistics", replicated=True)
                )
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
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            variable.assign((mean / scale if scale > 0 else mean).astype(dtype))
        self._surplus.assign(tf.zeros_like(self._surplus.value))


def row_weights_of(model: keras.Model) -> list[Any]:
    """Return the variables that hold this rank's weight in the average of the statistics."""
    return list(getattr(model, _ROW_WEIGHTS, []))


def steps_with_rows_of(model: keras.Model) -> list[Any]:
    """Return the variable that counts the steps in which this rank had rows of the batch.

    The result is a list, which is empty if no such variable is needed.
    """
    return list(getattr(model, _STEPS, []))
