"""The weight of a rank's loss. With it, N ranks train like one process with all batches.

The gradients of N ranks are averaged with equal weights, so a rank's loss is multiplied by the
weight w_r = N rows_r / rows. This makes (1/N) sum(w_r L_r) the mean over the rows of all ranks.
Keras' loss metric shows the same mean.

A loss that isn't a mean over rows is first multiplied by a factor f_r. With this factor, the mean
above equals the loss that one process would compute from the batches of all ranks. The factor
depends on the kind of loss:

- a mean over unmasked values: f_r = (values_r / values) / (rows_r / rows)
- a loss with ``reduction="mean_with_sample_weight"``: the same formula, with the sums of sample
  weights instead of the numbers of values
- a sum: f_r = rows / rows_r

With ``reduction=None`` Keras reports the mean of the values, but applies the gradient of their sum.

If ranks are lost, the sum of the remaining ranks' gradients is divided by the sum of their weights.
If all losses of the model are sums, the remaining gradients are added up without a division.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
from keras import ops

from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import flat_losses, scaling_losses
from hvdtrain.trainer.optimizer_mixins import Weighting

__all__ = [
    "LossWeights",
    "Term",
    "are_sums",
    "has_vector_losses",
    "ratio",
]


Scalar = Any  # a number, or a scalar tensor of Keras' backend


class Term(NamedTuple):
    """A loss that is a mean over unmasked values or sample weights instead of a mean over rows."""

    # Number of unmasked values in this rank's batch, or the sum of its sample weights. 0 if the
    # rank has no rows.
    count: Scalar
    factor: Scalar  # the factor f_r of the loss


def are_sums(model: keras.Model) -> bool:
    """Return whether the gradient of each loss of the model is the gradient of a sum over rows."""
    reductions = _reductions(model)
    return bool(reductions) and reductions <= {"sum", "none", None}


def has_vector_losses(model: keras.Model) -> bool:
    """Return whether a loss of the model is not reduced to a scalar."""
    return not _reductions(model).isdisjoint({"none", None})


def _reductions(model: keras.Model) -> set[str | None]:
    losses = [entry.loss for entry in flat_losses(model) if entry.loss is not None]
    return {getattr(loss, "reduction", "sum_over_batch_size") for loss in losses}


def ratio(a: Scalar, b: Scalar) -> Scalar:
    """Return a / b, or 0 if b is 0. The result of two numbers is a number, otherwise float32."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a / b if b else 0.0
    return ops.divide_no_nan(ops.cast(a, "float32"), ops.cast(b, "float32"))


class LossWeights:
    """The weight w_r of this rank's loss in each step. The module's docstring explains it.

    Args:
        reducer: Combines counts over ranks.
        model: The model, if ``joint_loss`` must look for losses that layers add.
    """

    exchanges: tuple[str, ...] = ("train", "test")
    """The kinds of steps in which all ranks take part, so that they may exchange counts."""

    def __init__(self, reducer: GradientReducer, model: keras.Model | None = None) -> None:
        self._reducer = reducer
        self._model = model
        self._size = reducer.collectives.size
        self._elastic = reducer.collectives.survives_losses

    def joint_rows(self, rows: Scalar, known: Scalar | None, sums: bool) -> Scalar:
        """Return the rows of all ranks: ``known``, or the result of an exchange if it is None."""
        return self._sum_over_ranks(rows) if known is None else known

    def weight(self, rows: Scalar, joint_rows: Scalar, sums: bool) -> Scalar:
        """Return the weight w_r of this rank's loss: a number, or a float32 scalar tensor.

        ``sums`` is the result of ``are_sums``.
        """
        scale = 1.0 if self._elastic and sums else float(self._size)
        return scale * ratio(rows, joint_rows)

    def weighting(
        self,
        sums: bool,
        weight: Scalar,
        factor: Scalar | None,
        terms: Sequence[Term | None],
    ) -> Weighting:
        """Return the arguments with which an optimizer combines the gradients of a loss over ranks.

        ``weight`` is the weight of the loss. The optimizer also multiplies the gradients by
        ``factor``. If the model may have a single loss, ``terms`` is what ``joint_loss`` yields.
        """
        if not self._elastic:
            return Weighting(factor=factor)
        if sums:
            return Weighting(factor=factor, op="sum")
        return Weighting(factor=factor, weight=weight, terms=terms)

    @contextmanager
    def joint_loss(
        self, rows: Scalar | None, joint_rows: Scalar | None, step: str
    ) -> Iterator[list[Term | None]]:
        """Multiply each loss that is computed within the block by its factor f_r.

        Ranks may exchange counts, so all of them must compute the same losses.

        Args:
            rows: Number of this rank's rows that count. None if only this rank runs the step; the
                losses are then not multiplied.
            joint_rows: Number of rows of all ranks. None if unknown.
            step: ``train`` or ``test``.

        Yields:
            A list with an entry for each loss that is computed in the block: its ``Term``, or None
            if the loss is a sum or a mean over rows. Losses that layers of ``model`` add count as
            one more entry, in elastic jobs.
        """
        terms: list[Term | None] = []
        if rows is None:
            yield terms
            return
        known = [] if joint_rows is None else [joint_rows]

        def factor(reduction: str | None, counted: Any) -> Scalar | None:
            if not terms and self._elastic and self._model is not None and self._model.losses:
                terms.append(None)
            is_sum = reduction == "sum"
            if reduction in ("none", None) or not (is_sum or counted is not None):
                terms.append(None)
                return None
            exchanges = step in self.exchanges
            if not known and exchanges:
                known.append(self._sum_over_ranks(rows))
            by_rows = ratio(known[0], rows) if known else ops.ones(())
            if is_sum:
                terms.append(None)
                return by_rows
            total = ops.sum(ops.cast(counted, "float32"))
            count = ops.where(ops.greater(rows, 0), total, ops.zeros_like(total))
            by = ratio(count, self._sum_over_ranks(count)) * by_rows if exchanges else ops.ones(())
            terms.append(Term(count, by))
            return by

        with scaling_losses(factor):
            yield terms

    def _sum_over_ranks(self, count: Scalar) -> Scalar:
        return self._reducer.reduce(ops.cast(count, "float32"), "sum", "counts of all ranks")
