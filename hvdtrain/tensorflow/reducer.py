"""From a list of gradients to their averages over all ranks, inside or outside a tf.function.

All ranks build the same graph, so the order of the reductions is known and nothing is negotiated.
At the first step of a new set of gradients the ranks compare names, shapes and types; after that
each reduction carries a digest of its shapes, which costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collectives, ReduceOp
from hvdtrain.errors import HvdtrainError, MismatchError, ModelError, NonFiniteError

__all__ = ["GradientReducer"]

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None: TensorFlow has no common type


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """What the ranks must agree on for one gradient."""

    name: str
    kind: str
    dtype: str
    shape: str

    @classmethod
    def of(cls, name: str, gradient: Gradient) -> _Entry:
        if gradient is None:
            return cls(name=name, kind="None", dtype="", shape="")
        if isinstance(gradient, tf.IndexedSlices):
            shape = str(gradient.values.shape[1:])
            return cls(name=name, kind="rows", dtype=gradient.dtype.name, shape=shape)
        return cls(name=name, kind="dense", dtype=gradient.dtype.name, shape=str(gradient.shape))

    def __str__(self) -> str:
        return self.kind if self.kind == "None" else f"{self.kind} {self.dtype} {self.shape}"


class GradientReducer:
    """Averages gradients over the ranks of ``collectives``.

    Args:
        collectives: The engine.
        non_finite: ``"error"`` raises on every rank when a gradient holds NaN or infinity and
            names rank and variable; ``"ignore"`` lets it through.
    """

    def __init__(self, collectives: Collectives, non_finite: str = "error") -> None:
        self.collectives = collectives
        # TensorFlow turns errors of Python functions into its own; here is the original.
        self.error: HvdtrainError | None = None
        self._require_finite = non_finite == "error"
        self._verified: set[tuple[_Entry, ...]] = set()

    def average(self, gradients: Sequence[Gradient], names: Sequence[str]) -> list[Gradient]:
        """The mean of each gradient over the ranks.

        Args:
            gradients: Tensors, ``IndexedSlices`` (their rows travel, the tables don't) or None;
                None must be None on every rank, and stays None.
            names: Of the variables, for errors.

        Raises:
            MismatchError: Names, shapes, types or None differ between ranks.
            NonFiniteError: A gradient holds NaN or infinity.
            ModelError: A gradient has rows, and the job is elastic.
            TooFewRanksError: Fewer ranks are left than an elastic job needs.
        """
        if self.collectives.size == 1:
            self._check_enough()
            return list(gradients)
        entries = tuple(_Entry.of(name, g) for name, g in zip(names, gradients))
        averages: list[Gradient] = list(gradients)
        if gradients and all(gradient is None for gradient in gradients):
            self._agree_on_nothing(entries)
        dense: dict[tf.DType, list[int]] = {}
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                averages[index] = self._average_rows(gradient, names[index], entries)
            elif gradient is not None:
                dense.setdefault(gradient.dtype, []).append(index)
        for dtype, indices in dense.items():
            group = [gradients[index] for index in indices]
            reduced = self._average_dense(group, [names[i] for i in indices], dtype, entries)
            for index, average in zip(indices, reduced):
                averages[index] = average
        return averages

    def reduce(self, value: tf.Tensor, op: ReduceOp, name: str) -> tf.Tensor:
        """Combine one small tensor over the ranks; for flags and counts."""
        if self.collectives.size == 1:
            return value

        def run(array: np.ndarray) -> np.ndarray:
            with self._remember_error():
                return self.collectives.allreduce(array, op, name=name)

        result = tf.numpy_function(run, [value], value.dtype)
        result.set_shape(value.shape)
        return result

    def _agree_on_nothing(self, entries: tuple[_Entry, ...]) -> None:
        """Without any gradient, see that the other ranks have none either."""

        def run() -> None:
            with self._remember_error():
                self._verify(entries)

        tf.numpy_function(run, [], [])

    def _average_dense(
        self,
        group: Sequence[tf.Tensor],
        names: Sequence[str],
        dtype: tf.DType,
        entries: tuple[_Entry, ...],
    ) -> list[tf.Tensor]:
        lacking = _lacking(entries)
        call = f"gradients, {lacking}" if lacking else "gradients"

        def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
            with self._remember_error():
                self._verify(entries)
                return tuple(self._reduce_checked(arrays, names, call))

        reduced = tf.numpy_function(run, group, [dtype] * len(group))
        if len(group) == 1 and not isinstance(reduced, (list, tuple)):
            reduced = [reduced]
        for average, gradient in zip(reduced, group):
            average.set_shape(gradient.shape)
        return list(reduced)

    def _reduce_checked(
        self, arrays: Sequence[np.ndarray], names: Sequence[str], call: str
    ) -> list[np.ndarray]:
        self._check_enough()
        try:
            return self.collectives.grouped_allreduce(
                arrays, "average", name=call, require_finite=self._require_finite
            )
        except NonFiniteError:
            bad = [
                f"{name} ({'NaN' if np.isnan(array).any() else 'infinity'})"
                for name, array in zip(names, arrays)
                if not np.isfinite(array).all()
            ]
            self._raise_non_finite(bad)
            raise

    def _average_rows(
        self, gradient: tf.IndexedSlices, name: str, entries: tuple[_Entry, ...]
    ) -> tf.IndexedSlices:
        size = self.collectives.size
        if self.collectives.survives_losses:
            raise ModelError(
                f"The gradient of {name} is sparse (IndexedSlices), and in an elastic job "
                "(--elastic) only dense ones can be averaged. Pass tf.convert_to_tensor(gradient)."
            )

        def run(values: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            with self._remember_error():
                self._verify(entries)
                rows = self.collectives.allgather(values, name=f"rows of {name}")
                where = self.collectives.allgather(indices, name=f"indices of {name}")
                if self._require_finite and not np.isfinite(rows).all():
                    self._raise_non_finite([] if np.isfinite(values).all() else [name])
                return rows * rows.dtype.type(1.0 / size), where

        values, indices = tf.numpy_function(
            run, [gradient.values, gradient.indices], [gradient.dtype, gradient.indices.dtype]
        )
        values.set_shape([None, *gradient.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _raise_non_finite(self, bad: list[str]) -> None:
        everyone = self.collectives.allgather_object(bad[:5], name="non-finite gradients")
        found = [
            f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(everyone) if names
        ]
        raise NonFiniteError(
            "A gradient is not finite: "
            + ("; ".join(found) or "the sum over all ranks overflowed")
            + ". Lower the learning rate, clip gradients or look at the data of that rank; "
            "HVDTRAIN_NON_FINITE=ignore lets such values through."
        )

    def _verify(self, entries: tuple[_Entry, ...]) -> None:
        """Compare a new set of gradients between ranks, once."""
        if entries in self._verified:
            return
        mine: dict[str, str] = {}
        met: Counter[str] = Counter()
        for entry in entries:
            met[entry.name] += 1
            number = met[entry.name]
            mine[entry.name if number == 1 else f"{entry.name}#{number}"] = str(entry)
        # With run_eagerly a rank may come here at a later step, when the others do not.
        everyone = self.collectives.allgather_object(
            mine, name="gradient signatures", note=_lacking(entries)
        )
        for rank, theirs in enumerate(everyone):
            if list(theirs.items()) != list(everyone[0].items()):
                raise MismatchError(_explain(everyone[0], rank, theirs))
        self._verified.add(entries)

    def _check_enough(self) -> None:
        if self.collectives.too_few is not None:
            raise self.collectives.too_few

    def _remember_error(self) -> _Remember:
        return _Remember(self)


class _Remember:
    """Keeps an error of hvdtrain for whoever catches TensorFlow's version of it."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, HvdtrainError):
            self._reducer.error = error


def _lacking(entries: Sequence[_Entry]) -> str:
    """Names the variables without a gradient, for the error of ranks that don't lack them."""
    names = [entry.name for entry in entries if entry.kind == "None"]
    return f"None for {', '.join(names[:5])}" if names else ""


def _explain(first: dict[str, str], rank: int, theirs: dict[str, str]) -> str:
    differences = [
        f"{name} is {first.get(name, 'absent')} on rank 0 and {theirs.get(name, 'absent')} on "
        f"rank {rank}"
        for name in {**first, **theirs}
        if first.get(name) != theirs.get(name)
    ]
    shown = "; ".join(differences[:5]) or "they come in another order"
    return (
        f"The gradients of rank 0 and rank {rank} differ: {shown}. All ranks must train the same "
        "variables with the same loss."
    )
