"""Computation of a rank's whole batch on one device, and functions that ``towers`` uses too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.frameworks.tensorflow.graph_order import collectives_of
from hvdtrain.private_api.keras import compute_loss, has_training_argument, loss_tracker
from hvdtrain.trainer.backends.tensorflow.graph_random import draws_of_step
from hvdtrain.trainer.loss_weights import Term, ratio

__all__ = ["BatchWeight", "OneDevice", "Within", "call", "rows_of", "scaled_loss"]

logger = logging.getLogger(__package__)

Within = Callable[[], AbstractContextManager[Any]]


class BatchWeight(NamedTuple):
    """The weight of this rank's batch."""

    rows: tf.Tensor  # number of this rank's rows that count
    joint_rows: tf.Tensor  # number of rows of all ranks
    weight: tf.Tensor  # from LossWeights.weight


class OneDevice:
    """Computes whole batches on the device that TensorFlow chooses, compiled with XLA if possible.

    Attributes:
        joint_loss: The method ``LossWeights.joint_loss``, which may communicate with other ranks.
            Must be set before the first step.
    """

    joint_loss: Callable[..., Any]

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._communicates = False
        self._test_step = model.test_step
        self._predict_step = model.predict_step

    @property
    def jit(self) -> bool:
        """Whether the model was compiled with ``jit_compile`` and runs in graphs."""
        return bool(self._model.jit_compile) and not self._model.run_eagerly

    def differentiate(
        self, within: Within, x: Any, y: Any, sample_weight: Any, counts: BatchWeight
    ) -> tuple[list[Any], list[Term | None], dict[str, Any]]:
        """Run the forward and backward pass, and compute the metrics.

        Args:
            within: Function that returns a context manager, in which the step runs. The operations
                of the context manager may be compiled with XLA too.
            x: The inputs of a batch, nested as the model expects them.
            y: The targets, or None.
            sample_weight: A weight for each sample, or None.
            counts: The weight of the batch.

        Returns:
            Three values. The first are the gradients of the weighted loss for all trainable
            weights. If the optimizer scales the loss, the gradients are scaled too. The second are
            the terms that ``joint_loss`` yields. The third is the result of the model's
            ``compute_metrics``.
        """
        return self._run(within, self._differentiate, x, y, sample_weight, counts)

    def test(
        self, within: Within, batch: Any, rows: tf.Tensor | None, joint_rows: tf.Tensor | None
    ) -> Any:
        """Run the model's ``test_step``.

        ``within`` is the same as in ``differentiate``. ``rows`` and ``joint_rows`` are the same as
        in ``LossWeights.joint_loss``.
        """
        return self._run(within, self._test, batch, rows, joint_rows)

    def predict(self, batch: Any) -> Any:
        """Run the model's ``predict_step``."""
        return self._run(nullcontext, self._predict_step, batch)

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

    def _run(self, within: Within, step: Callable[..., Any], *arguments: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with within():
                return step(*arguments)

        if self.jit and not self._communicates:
            draws = draws_of_step()
            before = len(draws)
            compiled = tf.function(run, jit_compile=True)
            if not collectives_of(compiled.get_concrete_function(*arguments).graph):
                return compiled(*arguments)
            logger.info(
                "jit_compile applies only to the optimizer's update, because ranks communicate "
                "within this model, and XLA does not support that. Masked losses and "
                "BatchNormalization(synchronized=True) need such communication."
            )
            del draws[before:]
            self._communicates = True
        return run(*arguments)


def call(model: keras.Model, x: Any, *, training: bool) -> Any:
    """Call the model in the same way as the steps of Keras."""
    return model(x, training=training) if has_training_argument(model) else model(x)


def scaled_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, counts: BatchWeight
) -> tf.Tensor:
    """Return the weighted and scaled loss, and update the loss metric with the original one."""
    loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    loss_tracker(model).update_state(loss, sample_weight=rows_of(x))
    weight = counts.weight
    if loss.shape.rank:
        # The gradient of an unreduced loss is the gradient of the sum of its values.
        weight *= ratio(counts.joint_rows, counts.rows)
    return model.optimizer.scale_loss(tf.cast(weight, loss.dtype) * loss)


def rows_of(structure: Any) -> tf.Tensor:
    """Return the number of samples in a batch as an int32 scalar."""
    first = next(leaf for leaf in keras.tree.flatten(structure) if leaf is not None)
    return tf.shape(first)[0]
