"""From a list of gradients to their averages over all ranks, inside or outside a tf.function.

All ranks build the same graph, so the order of the reductions is known and nothing is negotiated.
At the first step of a new set of gradients the ranks compare names, shapes and types; after that
each reduction carries a digest of its shapes, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import HvdtrainError, NonFiniteError
from hvdtrain.gradients.allreduce import allreduce, exchange
from hvdtrain.gradients.array_reduction import by_type
from hvdtrain.gradients.contributions import (
    Contributions,
    scale_without_lost,
    without_lost,
)
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.gradients.indexed_slices import pack_rows, unpack_rows
from hvdtrain.gradients.non_finite import describe_non_finite, name_non_finite, raise_non_finite
from hvdtrain.gradients.powersgd import PowerSGD
from hvdtrain.gradients.ranks import EngineRanks, Ranks
from hvdtrain.gradients.reduction_options import ReduceOptions
from hvdtrain.gradients.signatures import Signature, Signatures
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host
from hvdtrain.tensorflow.variable_names import variable_name

__all__ = ["GradientReducer"]

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None: TensorFlow has no common type


class GradientReducer:
    """Averages gradients over ranks.

    Args:
        ranks: Which ranks, and by what they do it.
        options: What else is to be done with gradients.
    """

    def __init__(self, ranks: Ranks, options: ReduceOptions | None = None) -> None:
        self._ranks = ranks
        self._options = options or ReduceOptions()
        rank = self._options.powersgd_rank
        self.feedback = ErrorFeedback(PowerSGD(rank)) if rank else None
        """The error feedback, for gradients of which a part is sent; None where all is sent."""
        self._local: dict[int, Any] = {}
        self._signatures = Signatures()
        self._goes_on = False
        self.contributions = Contributions()
        # TensorFlow turns errors of Python functions into its own; here is the original.
        self.error: HvdtrainError | None = None

    @classmethod
    def of_job(cls, what: str = "gradient") -> GradientReducer:
        """Make one over all ranks of the job, by its settings; ``what`` as in ``ReduceOptions``."""
        ranks = EngineRanks(world.collectives(), world.device_collectives())
        settings = world.settings()
        form, _, rank = settings.compression.partition(":")
        # Between the ranks of one host nothing is left out.
        several_hosts = len(set(world.hosts())) > 1
        options = ReduceOptions(
            non_finite=settings.non_finite,
            wire="none" if rank else form,
            powersgd_rank=int(rank) if rank and several_hosts else 0,
            what=what,
        )
        return cls(ranks, options)

    @property
    def collectives(self) -> Engine:
        """The engine of the ranks."""
        return self._ranks.collectives()

    def keep_local(self, variable: Any) -> None:
        """Leave the gradients of a variable to each rank from now on."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether the gradients of a variable are left to each rank."""
        return id(variable) in self._local

    def average(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        weight: tf.Tensor | None = None,
        op: Literal["average", "sum"] = "average",
    ) -> list[Gradient]:
        """The mean of each gradient over the ranks, or their sum, or what the options ask for.

        Args:
            gradients: Tensors, ``IndexedSlices`` (their rows travel, the tables don't) or None;
                None must be None on every rank, and stays None.
            variables: The variables that they belong to, or their names for errors.
            weight: What this rank's gradients have been multiplied with, a scalar whose mean over
                all ranks is 1. Where ranks were lost it no longer is, and the sums are divided by
                the sum of the weights. None where every rank counts the same.
            op: ``"sum"`` to add them up; then without ``weight``.

        Raises:
            MismatchError: Names, shapes, types or None differ between ranks.
            NonFiniteError: A gradient holds NaN or infinity.
            TooFewRanksError: Fewer ranks are left than an elastic job needs.
        """
        if not self._ranks.included():
            return list(gradients)
        results = list(map(_tensor, gradients))
        shared = self._set_local_apart(results, variables)
        if self._ranks.alone:
            return results
        sizes = [_known_bytes(gradient) for gradient in results]
        groups = self._options.divide(shared, variables, sizes, self._bucket_bytes())
        unchecked = self._options.unchecked
        if unchecked is not None:
            for group in groups:
                combined = exchange([results[n] for n in group], unchecked, self._ranks)
                _put(results, group, combined)
            return results
        names = [variable_name(variable) for variable in variables]
        signature = Signature.of(names, results)
        if results and not shared:
            # See that the other ranks have no gradients either.
            run_on_host(lambda: self._agree(signature), [], [])
        for group in groups:
            dense = [n for n in group if not isinstance(results[n], tf.IndexedSlices)]
            for n in sorted(set(group).difference(dense)):
                name = signature.names[n]
                results[n] = self._average_rows(results[n], name, signature, weight, op)
            feedback = self.feedback
            parts = [n for n in dense if feedback and feedback.takes(variables[n], results[n])]
            whole = [n for n in dense if n not in parts]
            for places in by_type([results[n] for n in whole]):
                same = [whole[place] for place in places]
                tensors, of = [results[n] for n in same], [names[n] for n in same]
                _put(results, same, self._average_dense(tensors, of, signature, weight, op))
            if feedback and parts:
                # Last, so that a step that an error ends before leaves what is kept as it was.
                tensors, by = [results[n] for n in parts], [variables[n] for n in parts]
                averages = self._average_parts(feedback, tensors, by, signature, weight, op)
                _put(results, parts, averages)
        return results

    def reduce(self, value: tf.Tensor, op: ReduceOp, name: str) -> tf.Tensor:
        """Combine one small tensor over the ranks; for flags and counts."""
        if self._ranks.alone:
            return value

        def run(array: np.ndarray) -> Arrays:
            with self.remember_error():
                return [self.collectives.allreduce(array, op, name=name)]

        return run_on_host(run, [value], [value.shape])[0]

    @contextmanager
    def tolerate_lost_ranks(self) -> Iterator[None]:
        """Within the block too few ranks are no error: whoever trains sees to it between steps."""
        self._goes_on = True
        try:
            yield
        finally:
            self._goes_on = False

    @contextmanager
    def allowing_non_finite(self) -> Iterator[None]:
        """Let NaN and infinity through in steps that are traced within the block."""
        before, self._options = self._options, replace(self._options, non_finite="ignore")
        try:
            yield
        finally:
            self._options = before

    def take_error(self, error: tf.errors.OpError) -> HvdtrainError | None:
        """Return, once, the error between ranks behind TensorFlow's own; None if there is none."""
        found, self.error = self.error, None
        on_devices = self._ranks.device_collectives()
        if found is None and on_devices is not None:
            return on_devices.cause_of(error)
        return found

    @contextmanager
    def remember_error(self) -> Iterator[None]:
        """Keeps an error of the block for whoever catches TensorFlow's version of it."""
        try:
            yield
        except HvdtrainError as error:
            self.error = error
            raise

    def _set_local_apart(self, results: list[Gradient], variables: Sequence[Any]) -> list[int]:
        """Scale what is left to each rank; returns the places of what is to be combined."""
        shared = []
        for n, (gradient, variable) in enumerate(zip(results, variables)):
            if gradient is None:
                continue
            if not self.is_local(variable):
                shared.append(n)
                if self._options.sparse_as_dense:
                    results[n] = tf.convert_to_tensor(gradient)
            elif self._options.scale_local:
                results[n] = tf.math.scalar_mul(1.0 / len(self._ranks.ranks), gradient)
        return shared

    def _bucket_bytes(self) -> int:
        """Return the bytes to combine at a time; 0 for all, which eagerly are there at once."""
        on_devices = self._ranks.device_collectives() is not None
        # Of a part of them there is little to hide, and each bucket would take rounds of its own.
        if on_devices or self.feedback is not None or tf.executing_eagerly():
            return 0
        return self.collectives.bucket_bytes

    def _agree(self, signature: Signature) -> Arrays:
        """Check that all ranks come with the same gradients; an operation without results."""
        with self.remember_error():
            self._signatures.agree(self.collectives, signature)
        return []

    def _average_dense(
        self,
        tensors: Sequence[tf.Tensor],
        names: Sequence[str],
        signature: Signature,
        weight: tf.Tensor | None,
        op: ReduceOp,
    ) -> list[tf.Tensor]:
        """Average tensors of one type."""
        what = self._options.what
        dtype, name = tensors[0].dtype, signature.call_name(what)
        weights = [] if weight is None else [tf.cast(weight, dtype)]
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
            return without_lost(averages, float(averages[-1]), dtype) if weights else averages

        def after(finite: bool, which: np.ndarray) -> None:
            with self.remember_error():
                if not finite:
                    raise_non_finite(self.collectives, describe_non_finite(names, *which), what)

        # On devices no ranks are lost, so that weights add up by themselves.
        averages = allreduce(
            [*tensors, *weights],
            op,
            on_devices=self._ranks.device_collectives(),
            on_host=on_host,
            name=name,
            before=lambda: self._agree(signature),
            after=after if require_finite else None,
        )
        return averages[: len(tensors)]

    def _average_parts(
        self,
        feedback: ErrorFeedback,
        tensors: Sequence[tf.Tensor],
        variables: Sequence[Any],
        signature: Signature,
        weight: tf.Tensor | None,
        op: ReduceOp,
    ) -> list[tf.Tensor]:
        """Average tensors of which a part is sent, of any floating types."""
        name = signature.call_name(self._options.what)
        kept = [feedback.keep(variable) for variable in variables]
        names = [variable_name(variable) for variable in variables]
        one = tf.ones([]) if weight is None else tf.cast(weight, tf.float32)

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
            return without_lost(averages, mean_weight, tf.float32)

        return run_on_host(on_host, [*tensors, one], [tensor.shape for tensor in tensors])

    def _average_rows(
        self,
        gradient: tf.IndexedSlices,
        name: str,
        signature: Signature,
        weight: tf.Tensor | None,
        op: ReduceOp,
    ) -> tf.IndexedSlices:
        dtype = gradient.dtype
        one = tf.ones([], dtype) if weight is None else tf.cast(weight, dtype)

        def run(values: np.ndarray, indices: np.ndarray, weight: np.ndarray) -> Arrays:
            with self.remember_error():
                collectives = self._begin(signature)
                packed = pack_rows(values, indices, weight)
                joined = collectives.allgather(packed, name=f"rows of {name}")
                self.contributions.add(collectives.contributed)
                rows, where, weights = unpack_rows(joined, values, indices)
                if self._options.non_finite == "error" and not np.isfinite(rows).all():
                    raise_non_finite(collectives, [] if np.isfinite(values).all() else [name])
                if op == "average":
                    scale = scale_without_lost(float(np.mean(weights)), dtype) / len(weights)
                    rows = rows * rows.dtype.type(scale)
                return [rows, where]

        values, indices = run_on_host(
            run,
            [gradient.values, gradient.indices, one],
            [[None, *gradient.values.shape[1:]], [None]],
        )
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    @contextmanager
    def _combining(
        self, signature: Signature, names: Sequence[str], arrays: Sequence[np.ndarray]
    ) -> Iterator[Engine]:
        """The engine, for one reduction of these arrays; notes whose are in it, and its errors."""
        with self.remember_error():
            collectives = self._begin(signature)
            try:
                yield collectives
            except NonFiniteError:
                bad = name_non_finite(names, arrays)
                raise_non_finite(collectives, bad, self._options.what)
            self.contributions.add(collectives.contributed)

    def _begin(self, signature: Signature) -> Engine:
        """The engine, when all ranks come with the same gradients and enough of them are left."""
        collectives = self.collectives
        self._signatures.agree(collectives, signature)
        if not self._goes_on and collectives.too_few is not None:
            raise collectives.too_few
        return collectives


def _tensor(gradient: Any) -> Gradient:
    """A gradient, of which a loop of one's own may have made an array."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.convert_to_tensor(gradient)


def _known_bytes(gradient: Gradient) -> int:
    """Bytes of a gradient, as far as its shape is known; 0 otherwise."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return 0
    return int(gradient.shape.num_elements() or 0) * int(gradient.dtype.size)


def _put(results: list[Gradient], places: Sequence[int], gradients: Sequence[Gradient]) -> None:
    for place, gradient in zip(places, gradients):
        results[place] = gradient
