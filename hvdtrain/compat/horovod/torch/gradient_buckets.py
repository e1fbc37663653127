"""Reduction of gradients in buckets, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.collectives.engine import Engine
from hvdtrain.compat.horovod.process_sets import ProcessSet
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, Sum
from hvdtrain.compat.horovod.torch.call_queue import calls
from hvdtrain.compat.horovod.torch.compression import Compression, Compressor
from hvdtrain.compat.horovod.torch.operations import Handle
from hvdtrain.compat.horovod.torch.reductions import sparse_allreduce_async
from hvdtrain.frameworks.torch import array_of, tensor_of
from hvdtrain.gradients.array_reduction import reduce_arrays
from hvdtrain.gradients.buckets import Groups, check_groups, divide
from hvdtrain.gradients.gradient_checks import Signature, Signatures

__all__ = ["GradientBuckets", "GradientOptions"]


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """How gradients are reduced.

    Attributes:
        op: The operation.
        compression: Class that converts gradients to the dtype in which they are sent.
        prescale: Factor for the gradients.
        postscale: Factor for the results.
        groups: Number of buckets, or lists of parameters. None divides by size.
        sparse_as_dense: Whether to convert sparse gradients to dense ones first.
    """

    op: ReduceOp = Average
    compression: type[Compressor] = Compression.none
    prescale: float = 1.0
    postscale: float = 1.0
    groups: Groups = None
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        check_groups(self.groups)
        if isinstance(self.groups, Sequence):
            parameters = [parameter for group in self.groups for parameter in group]
            if not all(isinstance(parameter, torch.Tensor) for parameter in parameters):
                raise ValueError("groups must consist of torch.Tensor.")
            if len(set(parameters)) < len(parameters):
                raise ValueError("A parameter can only appear once in groups.")


@dataclass
class _Reduction:
    """A bucket whose reduction has started: its gradients, and how to get the averages."""

    parameters: list[Any]
    results: Callable[[], list[np.ndarray]]
    sparse: list[tuple[Any, Handle]]


class GradientBuckets:
    """The gradients of an optimizer, which are reduced over the ranks of a process set.

    With several buckets, each is reduced in a thread as soon as it is complete. A parameter without
    a gradient contributes zeros. If no rank has a gradient, the parameter keeps none.

    Args:
        options: How gradients are reduced.
        process_set: Participating ranks.
    """

    def __init__(self, options: GradientOptions, process_set: ProcessSet) -> None:
        self._options = options
        self._process_set = process_set
        self._signatures = Signatures()
        self._names: dict[Any, str] = {}
        self._buckets: list[list[Any]] = []
        self._bucket_of: dict[Any, int] = {}
        self._missing: list[int] = []
        self._started: list[_Reduction] = []

    def divide(self, parameters: Sequence[Any], names: Sequence[str]) -> None:
        """Divide parameters into buckets, unless they are the same as before."""
        if self._started or list(map(id, self._names)) == list(map(id, parameters)):
            return
        self._names = dict(zip(parameters, names))
        sizes = [p.numel() * p.element_size() for p in parameters]
        indices = range(len(parameters))
        bucket_bytes = self._process_set.collectives().bucket_bytes
        groups = divide(self._options.groups, indices, parameters, sizes, bucket_bytes)
        self._buckets = [[parameters[n] for n in group] for group in groups]
        self._bucket_of = {p: n for n, bucket in enumerate(self._buckets) for p in bucket}
        self.reset()

    def reset(self) -> None:
        """Forget which gradients are ready, after all reductions have ended."""
        calls.wait()
        self._started = []
        self._missing = [len(bucket) for bucket in self._buckets]

    def ready(self, parameter: Any) -> None:
        """Start the reduction of each bucket that is complete with this gradient."""
        if len(self._buckets) == 1 or parameter not in self._bucket_of:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
            self._start(calls.add)

    def finish(self) -> None:
        """Reduce the remaining buckets, and replace the gradients by the results."""
        while len(self._started) < len(self._buckets):
            self._start(_at_once)
        started, flags = self._started, np.ones(len(self._names))
        results = [reduction.results() for reduction in started]
        if results and self._sends_flags:
            flags = results[-1].pop()
        used = {p: flag > 0 for p, flag in zip(self._names, flags)}
        with torch.no_grad():
            for reduction, arrays in zip(started, results):
                for parameter, array in zip(reduction.parameters, arrays):
                    if used[parameter]:
                        self._put(parameter, array)
                for parameter, handle in reduction.sparse:
                    parameter.grad = handle()
        self.reset()

    @property
    def _sends_flags(self) -> bool:
        return self._options.op in (Average, Sum)

    def _start(self, run: Callable[[Callable[[], Any]], Future[Any]]) -> None:
        """Start to reduce the next bucket."""
        number = len(self._started)
        parameters, sparse = self._buckets[number], []
        names = [self._names[p] for p in parameters]
        dense: list[Any] = []
        arrays: list[np.ndarray] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and not self._options.sparse_as_dense:
                sparse.append(parameter)
                continue
            dense.append(parameter)
            arrays.append(array_of(self._packed(parameter, gradient)))
        if self._sends_flags and number == len(self._buckets) - 1:
            has_gradient = [p.grad is not None for p in self._names]
            dtype = arrays[0].dtype if arrays else np.float32
            arrays.append(np.array(has_gradient, dtype))
        label = f"gradients of {names[0]} to {names[-1]}"
        future = run(lambda: self._reduce(arrays, label))
        handles = [
            (p, sparse_allreduce_async(p.grad, self._names[p], self._options.op, self._process_set))
            for p in sparse
        ]
        self._started.append(_Reduction(dense, future.result, handles))

    def _packed(self, parameter: Any, gradient: Any) -> Any:
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        return self._options.compression.compress(gradient)[0]

    def _reduce(self, arrays: list[np.ndarray], label: str) -> list[np.ndarray]:
        options, engine = self._options, self._process_set.collectives()
        self._agree(engine)
        factors = {"prescale": options.prescale, "postscale": options.postscale}
        return reduce_arrays(engine, arrays, options.op.tensor_op, **factors, name=label)

    def _agree(self, engine: Engine) -> None:
        """Check that all ranks have the same parameters, once for each set of parameters."""
        kinds = tuple(f"{p.dtype} {tuple(p.shape)}" for p in self._names)
        self._signatures.agree(engine, Signature(tuple(self._names.values()), kinds))

    def _put(self, parameter: Any, array: np.ndarray) -> None:
        gradient = parameter.grad
        value = self._options.compression.decompress(tensor_of(array, parameter), parameter.dtype)
        if gradient is None:
            parameter.grad = value
        elif gradient.is_sparse:
            parameter.grad = value.to_sparse(gradient.sparse_dim())
        elif gradient.device.type == "cpu" and gradient.dtype == value.dtype:
            gradient.set_(value)  # no copy
        else:
            gradient.copy_(value)


def _at_once(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(calls.run(call))
    return future
