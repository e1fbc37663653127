"""A rank with one device, as nearly all have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras.compute.interface import call, scaled_loss
from hvdtrain.keras.loss_weights import valid_values

__all__ = ["OneDevice"]


class OneDevice:
    """Computes whole batches where TensorFlow likes to, compiled with XLA if ``jit``."""

    def __init__(self, model: keras.Model, jit: bool) -> None:
        self._model = model
        self._jit = jit
        self.differentiate = self._maybe_jit(self._differentiate)
        self.test = self._maybe_jit(model.test_step)
        self.predict = self._maybe_jit(model.predict_step)

    def _differentiate(self, x: Any, y: Any, sample_weight: Any, weight: tf.Tensor) -> Any:
        model = self._model
        with tf.GradientTape() as tape:
            y_pred = call(model, x, training=True)
            scaled = scaled_loss(model, x, y, y_pred, sample_weight, weight)
        gradients = tape.gradient(scaled, model.trainable_weights)
        metrics = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return gradients, valid_values(y_pred), metrics

    def _maybe_jit(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if not self._jit:
            return step
        return tf.function(step, jit_compile=True, reduce_retracing=True)
