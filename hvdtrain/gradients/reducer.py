"""From a list of gradients to their averages over all ranks, inside or outside a tf.function.

All ranks build the same graph, so the order of the reductions is known and nothing is negotiated.
At the first step of a new set of gradients the ranks compare names, shapes and types; after that
each reduction carries a digest of its shapes, which costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.interface import Collectives, ReduceOp
from hvdtrain.errors import HvdtrainError, MismatchError, NonFiniteError
from hvdtrain.gradients.contributions import Contributions
from hvdtrain.gradients.indexed_slices import pack_rows, unpack_rows
from hvdtrain.tensorflow.device_collectives import DeviceCollectives
from hvdtrain.tensorflow.numpy_op import run_between_ranks
from hvdtrain.tensorflow.variable_names import counted_anew

__all__ = ["GradientReducer", "name_non_finite"]

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
        on_devices: What reduces dense gradients where they are, if anything does.
    """

    def __init__(
        self,
        collectives: Collectives,
        non_finite: str = "error",
        on_devices: DeviceCollectives | None = None,
    ) -> None:
        self.collectives = collectives
        self._on_devices = on_devices
        self.contributions = Contributions()
        self._goes_on = False
        # TensorFlow turns errors of Python functions into its own; here is the original.
        self.error: HvdtrainError | None = None
        self._require_finite = non_finite == "error"
        self._verified: set[tuple[_Entry, ...]] = set()

    @classmethod
    def of_job(cls) -> GradientReducer:
        """One over all ranks of the job, by its settings."""
        return cls(world.collectives(), world.settings().non_finite, world.device_collectives())

    def average(
        self,
        gradients: Sequence[Gradient],
        names: Sequence[str],
        weight: tf.Tensor | None = None,
        op: Literal["average", "sum"] = "average",
    ) -> list[Gradient]:
        """The mean of each gradient over the ranks, or their sum.

        Args:
            gradients: Tensors, ``IndexedSlices`` (their rows travel, the tables don't) or None;
                None must be None on every rank, and stays None.
            names: Of the variables, for errors.
            weight: What this rank's gradients have been multiplied with, a scalar whose mean over
                all ranks is 1. Where ranks were lost it no longer is, and the sums are divided by
                the sum of the weights. None where every rank counts the same.
            op: ``"sum"`` to add them up; then without ``weight``.

        Raises:
            MismatchError: Names, shapes, types or None differ between ranks.
            NonFiniteError: A gradient holds NaN or infinity.
            TooFewRanksError: Fewer ranks are left than an elastic job needs.
        """
        if self._alone:
            return list(gradients)
        labels = counted_anew(names)
        entries = tuple(_Entry.of(label, g) for label, g in zip(labels, gradients))
        averages: list[Gradient] = list(gradients)
        if gradients and all(gradient is None for gradient in gradients):
            self._agree_on_nothing(entries)
        dense: dict[tf.DType, list[int]] = {}
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                averages[index] = self._average_rows(gradient, labels[index], entries, weight, op)
            elif gradient is not None:
                dense.setdefault(gradient.dtype, []).append(index)
        for dtype, indices in dense.items():
            group = [gradients[index] for index in indices]
            of = [names[i] for i in indices]
            if self._on_devices is not None and self._on_devices.takes(group):
                reduced = self._average_on_devices(self._on_devices, group, of, entries, op)
            else:
                reduced = self._average_dense(group, of, dtype, entries, weight, op)
            for index, average in zip(indices, reduced):
                averages[index] = average
        return averages

    def reduce(self, value: tf.Tensor, op: ReduceOp, name: str) -> tf.Tensor:
        """Combine one small tensor over the ranks; for flags and counts."""
        if self._alone:
            return value

        def run(array: np.ndarray) -> np.ndarray:
            with self.remember_error():
                return self.collectives.allreduce(array, op, name=name)

        result = run_between_ranks(run, [value], value.dtype)
        result.set_shape(value.shape)
        return result

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Within the block too few ranks are no error: whoever trains sees to it between steps."""
        self._goes_on = True
        try:
            yield
        finally:
            self._goes_on = False

    def _agree_on_nothing(self, entries: tuple[_Entry, ...]) -> None:
        """Without any gradient, see that the other ranks have none either."""

        def run() -> None:
            with self.remember_error():
                self._verify(entries)

        run_between_ranks(run, [], [])

    def _average_dense(
        self,
        group: Sequence[tf.Tensor],
        names: Sequence[str],
        dtype: tf.DType,
        entries: tuple[_Entry, ...],
        weight: tf.Tensor | None,
        op: ReduceOp,
    ) -> list[tf.Tensor]:
        call = _call_name(entries)
        weights = [] if weight is None else [tf.cast(weight, dtype)]

        def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
            with self.remember_error():
                self._verify(entries)
                averages = self._reduce_checked(arrays, names, call, op)
                self.contributions.add(self.collectives.contributed)
                if weights:
                    scale = _scale_without_lost(float(averages.pop()), dtype)
                    if scale != 1.0:
                        averages = [average * average.dtype.type(scale) for average in averages]
                return tuple(averages)

        reduced = run_between_ranks(run, [*group, *weights], [dtype] * len(group))
        if len(group) == 1 and not isinstance(reduced, (list, tuple)):
            reduced = [reduced]
        for average, gradient in zip(reduced, group):
            average.set_shape(gradient.shape)
        return list(reduced)

    def _average_on_devices(
        self,
        on_devices: DeviceCollectives,
        group: Sequence[tf.Tensor],
        names: Sequence[str],
        entries: tuple[_Entry, ...],
        op: ReduceOp,
    ) -> list[tf.Tensor]:
        """As ``_average_dense``; no ranks are lost there, so that weights add up by themselves."""

        def before() -> None:
            with self.remember_error():
                self._verify(entries)

        def after(finite: bool, which: np.ndarray) -> None:
            with self.remember_error():
                if not finite:
                    self._raise_non_finite(_describe_non_finite(names, *which))

        return on_devices.allreduce(
            group,
            op,
            name=_call_name(entries),
            before=before,
            after=after if self._require_finite else None,
        )

    def _reduce_checked(
        self, arrays: Sequence[np.ndarray], names: Sequence[str], call: str, op: ReduceOp
    ) -> list[np.ndarray]:
        self._check_enough()
        try:
            return self.collectives.grouped_allreduce(
                arrays, op, name=call, require_finite=self._require_finite
            )
        except NonFiniteError:
            self._raise_non_finite(name_non_finite(names, arrays))
            raise

    def _average_rows(
        self,
        gradient: tf.IndexedSlices,
        name: str,
        entries: tuple[_Entry, ...],
        weight: tf.Tensor | None,
        op: ReduceOp,
    ) -> tf.IndexedSlices:
        dtype = gradient.dtype
        one = tf.ones([], dtype) if weight is None else tf.cast(weight, dtype)

        def run(
            values: np.ndarray, indices: np.ndarray, weight: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            with self.remember_error():
                self._verify(entries)
                self._check_enough()
                packed = pack_rows(values, indices, weight)
                joined = self.collectives.allgather(packed, name=f"rows of {name}")
                self.contributions.add(self.collectives.contributed)
                rows, where, weights = unpack_rows(joined, values, indices)
                if self._require_finite and not np.isfinite(rows).all():
                    self._raise_non_finite([] if np.isfinite(values).all() else [name])
                if op == "average":
                    scale = _scale_without_lost(float(np.mean(weights)), dtype) / len(weights)
                    rows = rows * rows.dtype.type(scale)
                return rows, where

        values, indices = run_between_ranks(
            run, [gradient.values, gradient.indices, one], [dtype, gradient.indices.dtype]
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

    @property
    def _alone(self) -> bool:
        """Whether there is nobody to reduce with, and never was."""
        return self.collectives.size == 1 and not self.collectives.survives_losses

    def _check_enough(self) -> None:
        if not self._goes_on and self.collectives.too_few is not None:
            raise self.collectives.too_few

    def take_error(self, error: tf.errors.OpError) -> HvdtrainError | None:
        """What TensorFlow has turned into an error of its own, if that came up between ranks."""
        found, self.error = self.error, None
        if found is None and self._on_devices is not None:
            return self._on_devices.error_behind(error)
        return found

    def remember_error(self) -> _Remember:
        """Keeps an error of the block for whoever catches TensorFlow's version of it."""
        return _Remember(self)


class _Remember:
    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, HvdtrainError):
            self._reducer.error = error


def name_non_finite(names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[str]:
    """The names of the arrays that hold NaN or infinity, with which of them it is."""
    nan = [bool(np.isnan(array).any()) for array in arrays]
    return _describe_non_finite(names, nan, [not np.isfinite(array).all() for array in arrays])


def _describe_non_finite(
    names: Sequence[str], nan: Sequence[bool], infinite: Sequence[bool]
) -> list[str]:
    return [
        f"{name} ({'NaN' if is_nan else 'infinity'})"
        for name, is_nan, is_infinite in zip(names, nan, infinite)
        if is_nan or is_infinite
    ]


def _call_name(entries: Sequence[_Entry]) -> str:
    lacking = _lacking(entries)
    return f"gradients, {lacking}" if lacking else "gradients"


def _scale_without_lost(mean_weight: float, dtype: tf.DType) -> float:
    """What makes a mean of weighted gradients one over the ranks that had a part in it.

    Rounding alone is not made up for: it would change what no rank was missing from.
    """
    if mean_weight <= 0 or abs(mean_weight - 1.0) <= 8 * float(_epsilon(dtype)):
        return 1.0
    return 1.0 / mean_weight


def _epsilon(dtype: tf.DType) -> float:
    return 2.0**-7 if dtype == tf.bfloat16 else float(np.finfo(dtype.as_numpy_dtype).eps)


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
