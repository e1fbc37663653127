"""Statistics that layers keep of their batches, such as BatchNormalization's, weighted by rows.

One process moves a statistic by m = a m + (1 - a) sum(n_r x_r) / n, where a is the momentum and x_r
the moment of the n_r rows that rank r has of a batch of n. N ranks together do the same if rank r
moves by itself as follows, and their statistic is the average of all m_r, weighted by c_r:

    w_r = N n_r / n
    c_r = a c_r + (1 - a) w_r, from 1 on
    m_r = m_r + (w_r / c_r) (1 - a) (x_r - m_r)

With equally many rows on all ranks w_r and c_r are 1. A rank without rows changes no statistic.
Of other layers' statistics the momentum is not known: they move as the layer says, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.keras.model_parts import layer_statistics
from hvdtrain.private_api.keras import flatten_layers, own_non_trainable_variables, set_untracked

__all__ = ["MovingStatistics", "row_weights_of", "steps_with_rows_of"]

_ATTRIBUTE = "_hvdtrain_row_weights"
_STEPS = "_hvdtrain_steps_with_rows"
_USUAL_MOMENTUM = 0.99


class MovingStatistics:
    """The statistics that the layers of a model keep of their batches.

    Args:
        model: Built.
        synchronized: Layers whose statistics are those of the joint batch already.
    """

    def __init__(self, model: keras.Model, synchronized: Sequence[Any] = ()) -> None:
        self._model = model
        # By id: variables whose value is that of a rank that has made all steps.
        self._complete = {
            id(v) for v in layer_statistics(model) if not tf.as_dtype(v.dtype).is_floating
        }
        momenta: dict[int, float] = {}
        for layer in flatten_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                variables = own_non_trainable_variables(layer)
                momenta.update({id(v): float(layer.momentum) for v in variables})
                if layer in synchronized:
                    self._complete.update(map(id, variables))
        self._variables = [v for v in layer_statistics(model) if id(v) not in self._complete]
        self._exact = [id(v) in momenta for v in self._variables]
        found = [momenta.get(id(v), _USUAL_MOMENTUM) for v in self._variables]
        self._momenta = sorted(set(found))
        self._places = {id(v): self._momenta.index(a) for v, a in zip(self._variables, found)}
        # All c_r - 1, by momentum: zero is what a checkpoint without them gives.
        self._surplus = keras.Variable(
            np.zeros(len(self._momenta), np.float32), trainable=False, name="row_weights"
        )
        set_untracked(model, _ATTRIBUTE, [self._surplus] if self._variables else [])
        # Steps with rows since the last average: it chooses the rank of complete values.
        self._steps = keras.Variable(0, dtype="int64", trainable=False, name="steps_with_rows")
        set_untracked(model, _STEPS, [self._steps] if self._complete else [])

    @contextmanager
    def moved_by(self, weight: tf.Tensor) -> Iterator[None]:
        """Let what a step within the block makes of its batch count with ``weight``, this w_r."""
        if self._complete:
            self._steps.assign_add(tf.cast(weight > 0, tf.int64))
        if not self._variables:
            yield
            return
        before = [tf.identity(tf.convert_to_tensor(v)) for v in self._variables]
        yield
        even = (tf.abs(weight - 1.0) < 1e-6) & tf.reduce_all(tf.equal(self._surplus.value, 0.0))
        tf.cond(even, lambda: None, lambda: self._move(before, weight))

    def _move(self, before: Sequence[tf.Tensor], weight: tf.Tensor) -> None:
        momenta = tf.constant(self._momenta, tf.float32)
        surplus = momenta * self._surplus.value + (1.0 - momenta) * (weight - 1.0)
        self._surplus.assign(surplus)
        for variable, old, exact in zip(self._variables, before, self._exact):
            new = tf.convert_to_tensor(variable)
            if exact:
                rate = weight / tf.maximum(1.0 + surplus[self._places[id(variable)]], 1e-30)
                new = old + tf.cast(rate, old.dtype) * (new - old)
            variable.assign(tf.where(weight > 0, new, old))

    def average(self, collectives: Engine, more: Sequence[Any] = ()) -> None:
        """Give all ranks the joint statistics, and the mean of ``more`` variables; collective.

        Whole numbers, which can't be averaged, and joint moments become those of the rank with the
        most steps.
        """
        if collectives.size == 1:
            return
        variables = [*layer_statistics(self._model), *more]
        root = 0
        if self._complete:
            steps = collectives.allgather(self._steps.numpy()[np.newaxis], name="steps with rows")
            root = int(steps.argmax())
            self._steps.assign(0)
        # In float64 the mean of equal numbers is that number, for any number of ranks.
        weights = 1.0 + np.asarray(self._surplus.numpy(), np.float64)
        weighted, scales = [], []
        for variable in variables:
            value = np.asarray(variable.numpy())
            if id(variable) in self._complete:
                theirs = collectives.broadcast(
                    value, root, name="layer statistics", replicated=True
                )
                variable.assign(theirs)
                continue
            place = self._places.get(id(variable))
            scale = 1.0 if place is None else weights[place]
            weighted.append((variable, value.astype(np.float64) * scale))
            scales.append(scale)
        if not weighted:
            return
        *means, mean_scales = collectives.grouped_allreduce(
            [*(value for _, value in weighted), np.array(scales)],
            "average",
            name="layer statistics",
        )
        for (variable, _), mean, scale in zip(weighted, means, mean_scales):
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            variable.assign((mean / scale if scale > 0 else mean).astype(dtype))
        self._surplus.assign(tf.zeros_like(self._surplus.value))


def row_weights_of(model: keras.Model) -> list[Any]:
    """Return the variables that say how much this rank's statistics count in the average."""
    return list(getattr(model, _ATTRIBUTE, []))


def steps_with_rows_of(model: keras.Model) -> list[Any]:
    """Return the variable that says whose statistics are complete, if some can't be averaged."""
    return list(getattr(model, _STEPS, []))
