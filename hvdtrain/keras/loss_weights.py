"""The weight of a rank's loss in the joint batch.

The gradients of N ranks are averaged with equal weights, so a rank's loss is multiplied by a
weight w_r that makes (1/N) sum(w_r L_r) the loss of the joint batch:

- losses that are means over the batch: w_r = N rows_r / rows
- losses weighted by ``mean_with_sample_weight``: w_r = N s_r / s, with s_r the sum of weights
- losses that are sums: w_r = N; regularisation, which is no sum over samples, keeps weight 1

Where ranks may be lost, N is the number that there was at first: the sum over those that are left
is then divided by the sum of their w_r, so that N cancels out. Losses that are sums have w_r = 1
there, and their gradients are added up.

Masks make a mean run over the unmasked values only; then rows_r counts those.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.optimizer_patch import Weighting
from hvdtrain.private_api.keras import flat_losses, mask_of

__all__ = ["LossWeights", "contribution", "reduction_of", "reductions_of", "valid_values"]

_MEANS = ("sum_over_batch_size", "mean")


def reduction_of(model: keras.Model) -> str:
    """Return how the model's losses are reduced over a batch: ``mean``, ``weights`` or ``sum``.

    Raises:
        ModelError: Some losses are means and others sums: no one weight fits both.
    """
    kinds = reductions_of(model)
    if len(kinds) > 1:
        flat = flat_losses(model)
        found = ", ".join(sorted(str(entry.loss.reduction) for entry in flat if entry.loss))
        raise ModelError(
            f"The losses of this model are reduced in different ways ({found}), so that no single "
            "weight makes ranks with unequal batches add up. Give all losses the same `reduction`."
        )
    return kinds.pop() if kinds else "mean"


def reductions_of(model: keras.Model) -> set[str]:
    """The ways in which the model's losses are reduced; see ``reduction_of``."""
    return {_kind(entry.loss) for entry in flat_losses(model) if entry.loss is not None}


def _kind(loss: Any) -> str:
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction in _MEANS:
        return "mean"
    return "weights" if reduction == "mean_with_sample_weight" else "sum"


def contribution(kind: str, rows: tf.Tensor, sample_weight: Any = None) -> tf.Tensor:
    """Return what a batch counts for beside others of the joint batch; a float32 scalar.

    ``rows`` are those of the batch, or its unmasked values.
    """
    mine = tf.cast(rows, tf.float32)
    if kind != "weights" or sample_weight is None:
        return mine
    weights = [tf.cast(w, tf.float32) for w in keras.tree.flatten(sample_weight)]
    if len(weights) > 1:
        raise ModelError(
            "Losses with reduction='mean_with_sample_weight' and one sample weight for "
            "each output don't add up over ranks; use one sample weight for all outputs."
        )
    return tf.where(mine > 0, tf.reduce_sum(weights[0]), 0.0)


class LossWeights:
    """The weight w_r of this rank's loss, step by step."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._size = reducer.collectives.size
        self._elastic = reducer.collectives.survives_losses

    def weight(
        self,
        kind: str,
        rows: tf.Tensor,
        joint_rows: tf.Tensor | None = None,
        sample_weight: Any = None,
    ) -> tf.Tensor:
        """Return w_r as a float32 scalar; communicates where the others' part is not known.

        Args:
            kind: From ``reduction_of``.
            rows: How many rows or unmasked values this rank contributes.
            joint_rows: The same over all ranks, or None.
            sample_weight: A weight for each sample, which Keras' loss gets; None for none.
        """
        size = tf.constant(self._size, tf.float32)
        mine = contribution(kind, rows, sample_weight)
        if kind == "sum":
            return tf.where(mine > 0, tf.ones_like(size) if self._elastic else size, 0.0)
        if kind == "weights" and sample_weight is not None:
            joint_rows = None
        return size * mine / tf.maximum(self._of_all(mine, joint_rows), 1e-30)

    def are_tracked(self, kind: str) -> bool:
        """Whether ``tracked`` holds for losses that are reduced in this way."""
        return True

    def tracked(
        self,
        kind: str,
        weight: tf.Tensor,
        rows: tf.Tensor,
        joint_rows: tf.Tensor | None,
    ) -> tf.Tensor:
        """Return the factor of a rank's loss for Keras' tracker, which takes means over rows.

        The joint batch's loss is to come out of the ranks' trackers together: its rows times
        (1/N) sum(w_r L_r). For a mean over rows that is 1.
        """
        mine = tf.cast(rows, tf.float32)
        joint = self._of_all(mine, joint_rows)
        factor = tf.where(mine > 0, 1.0, 0.0) * self._size if kind == "sum" else weight
        return tf.math.divide_no_nan(factor * joint, self._size * mine)

    def _of_all(self, mine: tf.Tensor, joint_rows: tf.Tensor | None) -> tf.Tensor:
        """The sum over the ranks as float32; communicates where it is not known."""
        if joint_rows is None:
            return self._reducer.reduce(mine, "sum", "rows of all ranks")
        return tf.cast(joint_rows, tf.float32)

    def weighting(self, kind: str, weight: tf.Tensor, factor: tf.Tensor | None) -> Weighting:
        """Return how an optimizer turns gradients of a weighted loss into those of the joint batch.

        ``factor`` is the number that the optimizer still multiplies gradients with; None for none.
        """
        if not self._elastic:
            return Weighting(factor=factor)
        if kind == "sum":
            return Weighting(factor=factor, op="sum")
        return Weighting(factor=factor, weight=weight)


def valid_values(outputs: Any) -> tf.Tensor | None:
    """Count the unmasked values of the outputs; None where nothing is masked."""
    masks = [mask_of(output) for output in keras.tree.flatten(outputs)]
    counts = [tf.reduce_sum(tf.cast(mask, tf.float32)) for mask in masks if mask is not None]
    if not counts:
        return None
    if len(masks) > 1:
        raise ModelError(
            "Several outputs with masks don't add up over ranks with one weight; drop the masks "
            "before the outputs and pass sample weights."
        )
    return counts[0]
