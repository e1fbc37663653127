"""The contract of a rank's devices with the steps of training, evaluation and prediction."""

from __future__ import annotations

from typing import Any, Protocol

import keras
import tensorflow as tf

from hvdtrain.keras.loss_weights import reduction_of
from hvdtrain.private_api.keras import compute_loss, loss_tracker, takes_training

__all__ = ["Compute", "call", "rows_of", "scaled_loss"]


class Compute(Protocol):
    """Computes with the batches of this rank; talks to no other."""

    def differentiate(
        self, x: Any, y: Any, sample_weight: Any, weight: tf.Tensor
    ) -> tuple[list[Any], tf.Tensor | None, dict[str, Any]]:
        """Run the forward and backward pass, and compute the metrics.

        Args:
            x: The inputs of a batch, nested as the model takes them.
            y: The targets; None for none.
            sample_weight: A weight for each sample; None for none.
            weight: The factor with which the loss counts in the joint batch; see ``LossWeights``.

        Returns:
            For each trainable weight the gradient of the weighted loss, scaled as the optimizer
            wants it; how many values of the outputs are unmasked, None where nothing is; and what
            the model's ``compute_metrics`` says.
        """

    def test(self, batch: Any) -> Any:
        """The model's ``test_step``."""

    def predict(self, batch: Any) -> Any:
        """The model's ``predict_step``."""


def call(model: keras.Model, x: Any, *, training: bool) -> Any:
    """The model's outputs, as Keras' own steps ask for them."""
    return model(x, training=training) if takes_training(model) else model(x)


def scaled_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, weight: tf.Tensor
) -> tf.Tensor:
    """The loss as ``differentiate`` needs it; the model's tracker sees it as it is."""
    loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    loss_tracker(model).update_state(loss, sample_weight=rows_of(x))
    factor = tf.cast(weight, loss.dtype)
    if reduction_of(model) == "sum":
        extra = tf.add_n(model.losses) if model.losses else tf.zeros([], loss.dtype)
        weighted = factor * (loss - extra) + extra
    else:
        weighted = factor * loss
    return model.optimizer.scale_loss(weighted)


def rows_of(structure: Any) -> tf.Tensor:
    """Return the number of samples in a batch; an int32 scalar."""
    first = next(leaf for leaf in keras.tree.flatten(structure) if leaf is not None)
    return tf.shape(first)[0]
