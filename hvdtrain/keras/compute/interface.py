"""The contract of a rank's devices with the steps of training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from hvdtrain.keras.loss_weights import Term, ratio
from hvdtrain.private_api.keras import compute_loss, has_training_argument, loss_tracker

__all__ = ["BatchWeight", "Compute", "call", "rows_of", "scaled_loss"]


class BatchWeight(NamedTuple):
    """What this rank's batch counts for.

    Attributes:
        rows: Its rows that count.
        joint_rows: The same over all ranks.
        weight: From ``LossWeights.weight``.
    """

    rows: tf.Tensor
    joint_rows: tf.Tensor
    weight: tf.Tensor


class Compute(Protocol):
    """Computes with the batches of this rank; communicates by ``joint_loss`` only."""

    joint_loss: Callable[..., Any]
    """``LossWeights.joint_loss``, set before the first step."""

    def differentiate(
        self, x: Any, y: Any, sample_weight: Any, counts: BatchWeight
    ) -> tuple[list[Any], list[Term | None], dict[str, Any]]:
        """Run the forward and backward pass, and compute the metrics.

        Args:
            x: The inputs of a batch, nested as the model takes them.
            y: The targets; None for none.
            sample_weight: A weight for each sample; None for none.
            counts: What the batch counts for.

        Returns:
            For each trainable weight the gradient of the weighted loss, scaled as the optimizer
            wants it; what ``joint_loss`` yields; and what the model's ``compute_metrics`` returns.
        """

    def test(self, batch: Any, rows: tf.Tensor | None, joint_rows: tf.Tensor | None) -> Any:
        """The model's ``test_step``; rows as ``LossWeights.joint_loss`` takes them."""

    def predict(self, batch: Any) -> Any:
        """The model's ``predict_step``."""


def call(model: keras.Model, x: Any, *, training: bool) -> Any:
    """The model's outputs, as Keras' own steps ask for them."""
    return model(x, training=training) if has_training_argument(model) else model(x)


def scaled_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, counts: BatchWeight
) -> tf.Tensor:
    """The loss as ``differentiate`` needs it; the model's tracker gets it without the weight."""
    loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    loss_tracker(model).update_state(loss, sample_weight=rows_of(x))
    weight = counts.weight
    if loss.shape.rank:
        # The gradient of a loss that is not reduced is that of the sum of its values.
        weight *= ratio(counts.joint_rows, counts.rows)
    return model.optimizer.scale_loss(tf.cast(weight, loss.dtype) * loss)


def rows_of(structure: Any) -> tf.Tensor:
    """Return the number of samples in a batch; an int32 scalar."""
    first = next(leaf for leaf in keras.tree.flatten(structure) if leaf is not None)
    return tf.shape(first)[0]
