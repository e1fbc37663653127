"""``GradientReducer``, which averages gradients over all ranks, also in compiled code.

All ranks run the same program, so they don't have to negotiate the order of reductions. When ranks
reduce a set of gradients for the first time, they compare names, shapes and dtypes. Later steps
only compare a digest of the shapes, which takes no extra time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from hvdtrain import frameworks, world
from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import HvdtrainError, NonFiniteError
from hvdtrain.frameworks.interface import Arrays, Framework
from hvdtrain.frameworks.variable_names import renumbered, variable_name
from hvdtrain.gradients.array_reduction import by_type, weight_correction, without_mean_weight
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.gradients.gradient_checks import (
    Signature,
    Signatures,
    describe_non_finite,
    is_sparse,
    kind,
    known_bytes,
    name_non_finite,
    raise_non_finite,
)
from hvdtrain.gradients.powersgd import PowerSGD
from hvdtrain.gradients.ranks import Contributions, EngineRanks, Ranks
from hvdtrain.gradients.reduction_options import ReduceOptions
from hvdtrain.gradients.sparse_rows import pack_rows, unpack_rows

__all__ = ["GradientReducer"]

Tensor = Any  # of the framework
Gradient = Any  # a tensor, tf.IndexedSlices or None

# Types in which devices send compressed gradients.
_SENT_AS = {"fp16": "float16", "bf16": "bfloat16"}


class GradientReducer:
    """Averages gradients over ranks.

    Args:
        ranks: The ranks that combine gradients.
        options: How they combine gradients.
        framework: The framework of the gradients. Defaults to the framework on which Keras runs.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: ReduceOptions | None = None,
        framework: Framework | None = None,
    ) -> None:
        self._ranks = ranks
        self.framework = framework or frameworks.of_keras()  # the framework of the gradients
        self._average_uncompiled = self.framework.uncompiled(self._average)
        self._reduce_uncompiled = self.framework.uncompiled(self._reduce)
        self._options = options or ReduceOptions()
        rank = self._options.powersgd_rank
        # Keeps the unsent parts of gradients. None without PowerSGD.
        self.feedback = ErrorFeedback(PowerSGD(rank)) if rank else None
        self._local: dict[int, Any] = {}
        self._signatures = Signatures()
        self._tolerates_losses = False
        self.contributions = Contributions()  # records which ranks contributed to each step
        self._error: HvdtrainError | None = None  # the latest communication error

    @classmethod
    def of_job(
        cls,
        what: str = "gradient",
        *,
        sparse_as_dense: bool = False,
        framework: Framework | None = None,
    ) -> GradientReducer:
        """Create the reducer for all ranks of the job, with the job's settings."""
        ranks = EngineRanks(world.collectives(), world.device_collectives())
        settings = world.settings()
        wire, _, rank = settings.compression.partition(":")
        # PowerSGD is only used between hosts.
        several_hosts = len(set(world.hosts())) > 1
        options = ReduceOptions(
            non_finite=settings.non_finite,
            wire="none" if rank else wire,
            powersgd_rank=int(rank) if rank and several_hosts else 0,
            sparse_as_dense=sparse_as_dense,
            what=what,
        )
        return cls(ranks, options, framework)

    @property
    def collectives(self) -> Engine:
        """The engine that runs the collectives."""
        return self._ranks.collectives()

    def keep_local(self, variable: Any) -> None:
        """Exclude the gradients of a variable from averaging."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradients of a variable are excluded from averaging."""
        return id(variable) in self._local

    def average(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        weight: Tensor | None = None,
        op: Literal["average", "sum"] = "average",
        *,
        add_rows: bool = False,
    ) -> list[Gradient]:
        """Return the average of each gradient over the ranks.

        Args:
            gradients: Tensors, ``tf.IndexedSlices`` or None. If a gradient is ``tf.IndexedSlices``,
                only its rows are sent. If a gradient is None, it must be None on every rank, and
                the average is None.
            variables: The variable of each gradient, or a name for error messages.
            weight: The number or scalar by which this rank has multiplied its gradients, or None if
                all ranks have the same weight. The mean of all ranks' weights must be 1. If a rank
                is lost, the averages are divided by the mean weight of the remaining ranks.
            op: ``"average"``, or ``"sum"`` to add the gradients up, which requires ``weight=None``.
            add_rows: Whether to add up the rows of ``tf.IndexedSlices`` that have the same index
                before they are sent.

        Raises:
            MismatchError: If names, shapes or dtypes differ between ranks, or if a gradient is None
                on only some ranks.
            NonFiniteError: If a gradient contains NaN or infinity.
            TooFewRanksError: If fewer ranks remain than an elastic job needs.
        """
        averages: list[Gradient] = self._average_uncompiled(
            gradients, variables, weight, op, add_rows
        )
        return averages

    def _average(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        weight: Tensor | None,
        op: Literal["average", "sum"],
        add_rows: bool,
    ) -> list[Gradient]:
        if not self._ranks.included():
            return list(gradients)
        results = list(map(self._tensor, gradients))
        shared = self._prepare_shared(results, variables)
        if self._ranks.alone:
            return results
        bucket_bytes = self._bucket_bytes()
        sizes = [bucket_bytes and known_bytes(gradient, self.framework) for gradient in results]
        groups = self._options.divide(shared, variables, sizes, bucket_bytes)
        unchecked = self._options.unchecked
        if unchecked is not None:
            for group in groups:
                combined = unchecked([results[n] for n in group], self._ranks)
                _put(results, group, combined)
            return results
        names = [variable_name(variable) for variable in variables]
        kinds = [kind(gradient, self.framework) for gradient in results]
        signature = Signature(_renumbered(tuple(names)), tuple(kinds))
        if results and not shared:
            # Check that the other ranks have no gradients either.
            self.framework.run_on_host(lambda: self._agree(signature), [], [])
        for group in groups:
            dense = [n for n in group if not self._is_sparse(results[n])]
            for n in sorted(set(group).difference(dense)):
                name = signature.names[n]
                results[n] = self._average_rows(results[n], name, signature, weight, op, add_rows)
            feedback = self.feedback
            low_rank = [
                n
                for n in dense
                if feedback and feedback.takes(variables[n], self.framework.numpy_type(results[n]))
            ]
            exact = [n for n in dense if n not in low_rank]
            for indices in by_type([results[n] for n in exact]):
                same = [exact[index] for index in indices]
                tensors, labels = [results[n] for n in same], [names[n] for n in same]
                _put(results, same, self._average_dense(tensors, labels, signature, weight, op))
            if feedback and low_rank:
                # Low-rank gradients come last, so that the kept arrays don't change if an error
                # occurs before.
                averages = self._average_low_rank(
                    feedback,
                    [results[n] for n in low_rank],
                    [variables[n] for n in low_rank],
                    signature,
                    weight,
                    op,
                )
                _put(results, low_rank, averages)
        return results

    def reduce(self, value: Tensor, op: ReduceOp, name: str) -> Tensor:
        """Reduce a small tensor over the ranks, such as a flag or a count."""
        return self._reduce_uncompiled(value, op, name)

    def _reduce(self, value: Tensor, op: ReduceOp, name: str) -> Tensor:
        if self._ranks.alone:
            return value

        def run(array: np.ndarray) -> Arrays:
            with self.remember_error():
                return [self.collectives.allreduce(array, op, name=name)]

        tensor = self.framework.to_tensor(value)
        return self.framework.run_on_host(run, [tensor], [tensor.shape])[0]

    @contextmanager
    def tolerate_lost_ranks(self) -> Iterator[None]:
        """Don't raise ``TooFewRanksError`` in the block, whose caller checks the ranks itself."""
        self._tolerates_losses = True
        try:
            yield
        finally:
            self._tolerates_losses = False

    @contextmanager
    def allowing_non_finite(self) -> Iterator[None]:
        """Allow NaN and infinity in steps that are traced within the ``with`` block."""
        before, self._options = self._options, replace(self._options, non_finite="ignore")
        try:
            yield
        finally:
            self._options = before

    @contextmanager
    def raising_own_errors(self) -> Iterator[None]:
        """Raise a communication error itself if the framework raises another exception about it."""
        self._error = None
        try:
            yield
        except self.framework.ERRORS as raised:
            cause = self._cause_of(raised)
            if cause is None:
                raise
            raise cause from None

    def _cause_of(self, raised: Exception) -> HvdtrainError | None:
        """Return the communication error that a framework's exception is about, or None."""
        error, self._error = self._error, None
        # An earlier error may have been raised and caught. TensorFlow shortens very long texts.
        if error is not None and str(error)[:200] in str(raised):
            return error
        on_devices = self._ranks.device_collectives()
        return None if on_devices is None else on_devices.cause_of(raised)

    @contextmanager
    def remember_error(self) -> Iterator[None]:
        """If an error is raised in the ``with`` block, store it for ``raising_own_errors``."""
        try:
            yield
        except HvdtrainError as error:
            self._error = error
            raise

    def _prepare_shared(self, results: list[Gradient], variables: Sequence[Any]) -> list[int]:
        """Return the indices of the gradients to average, which don't belong to local variables.

        If the options say so, gradients of local variables are scaled, and sparse gradients of
        other variables are converted to dense tensors.
        """
        shared = []
        for n, (gradient, variable) in enumerate(zip(results, variables)):
            if gradient is None:
                continue
            if not self.is_local(variable):
                shared.append(n)
                if self._options.sparse_as_dense:
                    results[n] = self.framework.to_tensor(gradient)
            elif self._options.scale_local:
                results[n] = self.framework.scaled(gradient, 1.0 / len(self._ranks.ranks))
        return shared

    def _is_sparse(self, gradient: Gradient) -> bool:
        return is_sparse(gradient, self.framework)

    def _tensor(self, gradient: Gradient) -> Gradient:
        """Convert an array, which a custom training loop may pass, to a tensor."""
        if gradient is None or self._is_sparse(gradient):
            return gradient
        return self.framework.to_tensor(gradient)

    def _bucket_bytes(self) -> int:
        """Return the size of a bucket in bytes, or 0 to average all gradients together."""
        on_devices = self._ranks.device_collectives() is not None
        # Only graphs reduce some gradients while they compute others. With PowerSGD, there is
        # little communication to overlap.
        if on_devices or self.feedback is not None or not self.framework.runs_later():
            return 0
        return self.collectives.bucket_bytes

    def _agree(self, signature: Signature) -> Arrays:
        """Check on the host that all ranks have the same gradients. Returns no arrays."""
        with self.remember_error():
            self._signatures.agree(self.collectives, signature)
        return []

    def _average_dense(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        signature: Signature,
        weight: Tensor | None,
        op: ReduceOp,
    ) -> list[Tensor]:
        """Average tensors of one dtype."""
        what = self._options.what
        name = signature.call_name(what)
        weights = [] if weight is None else [self.framework.scalar(weight, tensors[0])]
        require_finite = self._options.non_finite == "error"

        def on_host(*arrays: np.ndarray) -> Arrays:
            with self._combining(signature, names, arrays) as collectives:
                averages = collectives.grouped_allreduce(
                    arrays,
                    op,
                    name=name,
                    require_finite=require_finite,
                    wire=self._options.wire,
                )
            return without_mean_weight(averages, float(averages[-1])) if weights else averages

        def after(finite: bool, which: np.ndarray) -> None:
            with self.remember_error():
                if not finite:
                    raise_non_finite(self.collectives, describe_non_finite(names, *which), what)

        sent, on_devices = [*tensors, *weights], self._ranks.device_collectives()
        if on_devices is None or not on_devices.supports(sent):
            averages = self.framework.run_on_host(on_host, sent, [tensor.shape for tensor in sent])
        else:
            # On devices no ranks are lost, so the mean weight remains 1.
            averages = on_devices.allreduce(
                sent,
                op,
                name=name,
                sent_as=_SENT_AS.get(self._options.wire),
                before=lambda: self._agree(signature),
                after=after if require_finite else None,
            )
        return averages[: len(tensors)]

    def _average_low_rank(
        self,
        feedback: ErrorFeedback,
        tensors: Sequence[Tensor],
        variables: Sequence[Any],
        signature: Signature,
        weight: Tensor | None,
        op: ReduceOp,
    ) -> list[Tensor]:
        """Average tensors with PowerSGD. The tensors may have different floating dtypes."""
        name = signature.call_name(self._options.what)
        kept = [feedback.keep(variable) for variable in variables]
        names = [variable_name(variable) for variable in variables]
        like = self.framework.to_tensor(np.ones((), np.float32))
        one = like if weight is None else self.framework.scalar(weight, like)

        def on_host(*arrays: np.ndarray) -> Arrays:
            *gradients, weight = arrays
            with self._combining(signature, names, gradients) as collectives:
                averages, mean_weight = feedback.average(
                    collectives,
                    kept,
                    gradients,
                    op=op,
                    weight=float(weight),
                    require_finite=self._options.non_finite == "error",
                    name=name,
                )
            return without_mean_weight(averages, mean_weight, np.dtype(np.float32))

        shapes = [tensor.shape for tensor in tensors]
        return self.framework.run_on_host(on_host, [*tensors, one], shapes)

    def _average_rows(
        self,
        gradient: Gradient,
        name: str,
        signature: Signature,
        weight: Tensor | None,
        op: ReduceOp,
        add_rows: bool,
    ) -> Gradient:
        sparse = self.framework.SPARSE_ROWS
        assert sparse is not None
        values, indices = sparse.split(sparse.add_duplicates(gradient) if add_rows else gradient)
        one = self.framework.scalar(1.0 if weight is None else weight, values)

        def run(values: np.ndarray, indices: np.ndarray, weight: np.ndarray) -> Arrays:
            with self.remember_error():
                collectives = self._begin(signature)
                packed = pack_rows(values, indices, weight)
                joined = collectives.allgather(packed, name=f"rows of {name}")
                self.contributions.add(collectives.contributed)
                rows, row_indices, weights = unpack_rows(joined, values, indices)
                if self._options.non_finite == "error" and not np.isfinite(rows).all():
                    raise_non_finite(collectives, [] if np.isfinite(values).all() else [name])
                if op == "average":
                    correction = weight_correction(float(np.mean(weights)), rows.dtype)
                    scale = correction / len(weights)
                    rows = rows * rows.dtype.type(scale)
                return [rows, row_indices]

        shapes = [[None, *values.shape[1:]], [None]]
        rows = self.framework.run_on_host(run, [values, indices, one], shapes)
        return sparse.join(rows[0], rows[1], gradient)

    @contextmanager
    def _combining(
        self, signature: Signature, names: Sequence[str], arrays: Sequence[np.ndarray]
    ) -> Iterator[Engine]:
        """Yield the engine for one reduction. Record who contributes, and errors."""
        with self.remember_error():
            collectives = self._begin(signature)
            try:
                yield collectives
            except NonFiniteError:
                bad = name_non_finite(names, arrays)
                raise_non_finite(collectives, bad, self._options.what)
            self.contributions.add(collectives.contributed)

    def _begin(self, signature: Signature) -> Engine:
        """Check that all ranks have the same gradients, and return the engine."""
        collectives = self.collectives
        self._signatures.agree(collectives, signature)
        if not self._tolerates_losses and collectives.too_few is not None:
            raise collectives.too_few
        return collectives


@functools.lru_cache
def _renumbered(names: tuple[str, ...]) -> tuple[str, ...]:
    # Eager steps call this with the same names again and again.
    return tuple(renumbered(names))


def _put(results: list[Gradient], indices: Sequence[int], gradients: Sequence[Gradient]) -> None:
    for index, gradient in zip(indices, gradients):
        results[index] = gradient
