"""Reduction of gradients in buckets. All ranks reduce the same buckets in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.compat.horovod.process_sets import ProcessSet
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, Sum
from hvdtrain.compat.horovod.torch.call_queue import calls
from hvdtrain.compat.horovod.torch.compression import Compression, Compressor
from hvdtrain.compat.horovod.torch.operations import Handle
from hvdtrain.compat.horovod.torch.reductions import sparse_allreduce_async
from hvdtrain.frameworks.torch.tensors import array_of, tensor_of
from hvdtrain.gradients.array_reduction import reduce_arrays
from hvdtrain.gradients.buckets import Groups, check_groups, divide
from hvdtrain.gradients.gradient_checks import Signature, Signatures

__all__ = ["GradientBuckets", "GradientOptions"]


_Call = Callable[[], list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """The options of a reduction of gradients."""

    op: ReduceOp = Average  # the reduction, such as ``Average``
    # class that converts gradients to the dtype in which they are sent
    compression: type[Compressor] = Compression.none
    prescale: float = 1.0  # factor by which gradients are multiplied before the reduction
    postscale: float = 1.0  # factor by which the results are multiplied
    # Number of buckets, or a list of parameters for each bucket. With None, parameters are divided
    # into buckets of a certain size in bytes.
    groups: Groups = None
    # whether to convert sparse gradients to dense gradients before they are reduced
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
    """A bucket whose reduction has started.

    ``indices`` are the indices of its parameters with dense gradients. ``results`` is a function
    that waits for the results. ``sparse`` contains the index of each parameter with a sparse
    gradient, and a handle that returns its result.
    """

    indices: list[int]
    results: _Call
    sparse: list[tuple[int, Handle]]


class GradientBuckets:
    """The gradients of an optimizer, which are reduced over the ranks of a process set.

    If there are several buckets, the reduction of a bucket starts in a thread as soon as the bucket
    is complete. A parameter without a gradient contributes zeros. A parameter that has no gradient
    on any rank gets no gradient.

    Args:
        options: The options of the reduction.
        process_set: Participating ranks.
    """

    def __init__(self, options: GradientOptions, process_set: ProcessSet) -> None:
        self._options = options
        self._process_set = process_set
        self._signatures = Signatures()
        self._signature: Signature | None = None  # None once the ranks have compared it
        self._parameters: list[Any] = []
        self._names: Sequence[str] = ()
        self._buckets: list[list[int]] = []  # indices of parameters
        # Tensors as keys are slow, so this maps their ids.
        self._bucket_of: dict[int, int] = {}
        self._missing: list[int] = []
        self._started: list[_Reduction] = []

    def divide(self, parameters: list[Any], names: Sequence[str]) -> None:
        """Divide parameters into buckets."""
        self._parameters, self._names = parameters, names
        kinds = tuple(f"{p.dtype} {tuple(p.shape)}" for p in parameters)
        self._signature = Signature(tuple(names), kinds)
        sizes = [p.numel() * p.element_size() for p in parameters]
        bucket_bytes = self._process_set.collectives().bucket_bytes
        indices = range(len(parameters))
        self._buckets = divide(self._options.groups, indices, parameters, sizes, bucket_bytes)
        self._bucket_of = {
            id(parameters[index]): n for n, bucket in enumerate(self._buckets) for index in bucket
        }
        self.reset()

    @property
    def started(self) -> bool:
        """Whether the reduction of at least one bucket has started."""
        return bool(self._started)

    def reset(self) -> None:
        """Wait until all reductions have ended, and prepare for the gradients of the next step."""
        calls.wait()
        self._started = []
        self._missing = [len(bucket) for bucket in self._buckets]

    def ready(self, parameter: Any) -> None:
        """Record that a parameter's gradient is computed.

        Start to reduce buckets that are complete now.
        """
        bucket = self._bucket_of.get(id(parameter))
        if len(self._buckets) == 1 or bucket is None:
            return
        self._missing[bucket] -= 1
        while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
            self._start(lambda call: calls.add(call).result)

    def finish(self) -> None:
        """Reduce the remaining buckets, and replace all gradients with the results."""
        while len(self._started) < len(self._buckets):
            self._start(_at_once)
        started, has_gradient = self._started, [1.0] * len(self._parameters)
        results = [reduction.results() for reduction in started]
        if results and self._sends_flags:
            has_gradient = results[-1].pop().tolist()
        with torch.no_grad():
            for reduction, arrays in zip(started, results):
                for index, array in zip(reduction.indices, arrays):
                    if has_gradient[index]:
                        self._put(self._parameters[index], array)
                for index, handle in reduction.sparse:
                    self._parameters[index].grad = handle()
        self.reset()

    @property
    def _sends_flags(self) -> bool:
        return self._options.op in (Average, Sum)

    def _start(self, run: Callable[[_Call], _Call]) -> None:
        """Start to reduce the next bucket with ``run``, which returns a function that waits."""
        number, options = len(self._started), self._options
        bucket, gradients = self._buckets[number], [p.grad for p in self._parameters]
        sparse: list[int] = []
        if not options.sparse_as_dense:
            sparse = [n for n in bucket if gradients[n] is not None and gradients[n].is_sparse]
        dense = [index for index in bucket if index not in sparse] if sparse else bucket
        arrays = [array_of(self._packed(self._parameters[n], gradients[n])) for n in dense]
        if self._sends_flags and number == len(self._buckets) - 1:
            dtype = arrays[0].dtype if arrays else np.float32
            arrays.append(np.array([gradient is not None for gradient in gradients], dtype))
        label = f"gradients of {self._names[bucket[0]]} to {self._names[bucket[-1]]}"
        if sparse:
            # For the error if a gradient is sparse on some ranks only.
            label += f" without sparse gradients of {', '.join(self._names[n] for n in sparse)}"
        results = run(lambda: self._reduce(arrays, label))
        handles = [
            (n, sparse_allreduce_async(gradients[n], self._names[n], options.op, self._process_set))
            for n in sparse
        ]
        self._started.append(_Reduction(dense, results, handles))

    def _packed(self, parameter: Any, gradient: Any) -> Any:
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        return self._options.compression.compress(gradient)[0]

    def _reduce(self, arrays: list[np.ndarray], label: str) -> list[np.ndarray]:
        options, engine = self._options, self._process_set.collectives()
        if self._signature is not None:
            self._signatures.agree(engine, self._signature)
            self._signature = None
        factors = {"prescale": options.prescale, "postscale": options.postscale}
        return reduce_arrays(engine, arrays, options.op.tensor_op, **factors, name=label)

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


def _at_once(call: _Call) -> _Call:
    results = calls.run(call)
    return lambda: results
