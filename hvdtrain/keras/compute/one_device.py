"""A rank with one device, as nearly all have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras.compute.interface import BatchWeight, call, scaled_loss
from hvdtrain.keras.rank_random import draws_of_step
from hvdtrain.tensorflow.graph_order import collectives_of

__all__ = ["OneDevice"]

logger = logging.getLogger(__package__)


class OneDevice:
    """Computes whole batches where TensorFlow likes to, compiled with XLA if ``jit``."""

    joint_loss: Callable[..., Any]

    def __init__(self, model: keras.Model, jit: bool) -> None:
        self._model = model
        self._jit = jit
        self._test_step = model.test_step
        self.predict = (
            tf.function(model.predict_step, jit_compile=True, reduce_retracing=True)
            if jit
            else model.predict_step
        )

    def differentiate(self, x: Any, y: Any, sample_weight: Any, counts: BatchWeight) -> Any:
        """Run the forward and backward pass; see ``Compute``."""
        return self._run(self._differentiate, x, y, sample_weight, counts)

    def test(self, batch: Any, rows: tf.Tensor | None, joint_rows: tf.Tensor | None) -> Any:
        """The model's ``test_step``."""
        return self._run(self._test, batch, rows, joint_rows)

    def _differentiate(self, x: Any, y: Any, sample_weight: Any, counts: BatchWeight) -> Any:
        model = self._model
        rows, joint_rows, _ = counts
        with tf.GradientTape() as tape:
            y_pred = call(model, x, training=True)
            with self.joint_loss(rows, joint_rows, "train") as terms:
                scaled = scaled_loss(model, x, y, y_pred, sample_weight, counts)
        gradients = tape.gradient(scaled, model.trainable_weights)
        metrics = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return gradients, terms, metrics

    def _test(self, batch: Any, rows: Any, joint_rows: Any) -> Any:
        with self.joint_loss(rows, joint_rows, "test"):
            return self._test_step(batch)

    def _run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        if self._jit:
            draws = draws_of_step()
            before = len(draws)
            compiled = tf.function(step, jit_compile=True)
            if not collectives_of(compiled.get_concrete_function(*arguments).graph):
                return compiled(*arguments)
            logger.info(
                "Ranks exchange values within the steps of this model, as for masked losses and "
                "BatchNormalization(synchronized=True), which XLA can't; it runs without "
                "jit_compile."
            )
            del draws[before:]
            self._jit = False
        return step(*arguments)
