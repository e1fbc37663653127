"""Horovod's reductions of PyTorch tensors, with gradients.

All ranks must make the same calls in the same order. If the name, shape, dtype or options of a call
differ between ranks, every rank raises an error. If only some ranks make a call, these ranks raise
an error after ``HVDTRAIN_TIMEOUT_S`` seconds.

A function whose name ends with ``async`` returns a handle. Pass the handle to ``poll`` or
``synchronize``. A function whose name ends with an underscore, such as ``allreduce_``, changes its
tensors in place. Gradients are scaled as in Horovod. ``allreduce`` returns the gradient of the sum
of all ranks' losses. ``reducescatter`` returns this gradient multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvdtrain.collectives.kernels import ReduceOp as EngineOp
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, Sum, choose_op
from hvdtrain.compat.horovod.torch.call_queue import calls
from hvdtrain.compat.horovod.torch.compression import Compression, Compressor
from hvdtrain.compat.horovod.torch.operations import (
    Handle,
    all_of,
    differentiable,
    in_place,
    synchronize,
    waiting,
)
from hvdtrain.frameworks.torch.tensors import array_of, tensor_of
from hvdtrain.gradients.array_reduction import gradient_share, reduce_arrays, scale

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]

Tensors = Sequence[torch.Tensor]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce several tensors at once.

    The arguments are the same as in ``allreduce_async``.
    """
    how = choose_op(op, average).tensor_op
    arrays = list(map(array_of, tensors))
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}

    def reduce() -> list[np.ndarray]:
        return reduce_arrays(process_set.collectives(), arrays, how, **factors, name=name or "")

    return Handle(reduce, lambda results: list(map(tensor_of, results, tensors)))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce the tensors of all ranks elementwise.

    Args:
        tensor: Tensor with the same shape and type on all ranks.
        average: Deprecated. Use ``op`` instead. True means Average and False means Sum.
        name: Name for error messages, which must be the same on all ranks.
        op: Average, Sum, Adasum, Min, Max or Product. Defaults to Average. Averages of integers are
            rounded towards zero.
        prescale_factor: Factor applied before the reduction.
        postscale_factor: Factor applied after the reduction.
        process_set: Participating ranks. Defaults to all ranks.
    """
    factors = prescale_factor, postscale_factor
    reduced = grouped_allreduce_async([tensor], average, name, op, *factors, process_set)
    return reduced.then(lambda outputs: outputs[0])


grouped_allreduce_async_ = in_place(grouped_allreduce_async, "Start to replace several tensors.")
grouped_allreduce_ = waiting(grouped_allreduce_async_, "Replace several tensors.")
allreduce_async_ = in_place(allreduce_async, "Start to replace a tensor by the reduction.")
allreduce_ = waiting(allreduce_async_, "Replace a tensor by the reduction.")


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensors of all ranks elementwise.

    ``compression`` is the data type in which the tensor is sent, such as ``Compression.fp16``. The
    other arguments are the same as in ``allreduce_async``.

    Raises:
        MismatchError: If shapes, types, names or options differ between ranks.
    """
    factors = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in one collective. The arguments are the same as in ``allreduce``."""
    how = choose_op(op, average)
    factors = float(prescale_factor), float(postscale_factor)

    def forward(*values: torch.Tensor) -> list[torch.Tensor]:
        return synchronize(grouped_allreduce_async(values, None, name, how, *factors, process_set))

    def backward(*upstream: torch.Tensor) -> list[torch.Tensor]:
        label = f"gradient of {name or 'allreduce'}"
        if how in (ReduceOp.Min, ReduceOp.Max, ReduceOp.Product):
            pairs = [(array_of(up), array_of(value)) for up, value in zip(upstream, packed)]
            return calls.run(lambda: [share(*pair, label) for pair in pairs])
        return synchronize(
            grouped_allreduce_async(upstream, None, label, how, *factors, process_set)
        )

    def share(upstream: np.ndarray, value: np.ndarray, label: str) -> torch.Tensor:
        engine, scaled = process_set.collectives(), scale(value, factors[0])
        part = gradient_share(how.tensor_op, upstream, scaled, label, engine)
        return tensor_of(scale(part, factors[0] * factors[1]), packed[0])

    packed, contexts = zip(*map(compression.compress, tensors))
    reduced = differentiable(forward, backward, packed)
    return [compression.decompress(*pair) for pair in zip(reduced, contexts)]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to add up or average sparse tensors, by gathering the entries of all ranks."""
    indices, values = array_of(tensor._indices().t()), array_of(tensor._values())

    def gather() -> list[np.ndarray]:
        engine = process_set.collectives()
        parts = [engine.allgather(part, name=name or "") for part in (indices, values)]
        factor = 1.0 / engine.size if op == Average else 1.0
        return [parts[0], scale(parts[1], factor)]

    def finish(parts: list[np.ndarray]) -> torch.Tensor:
        entries, numbers = (tensor_of(part, tensor) for part in parts)
        return torch.sparse_coo_tensor(entries.t(), numbers, tensor.size()).coalesce()

    return Handle(gather, finish)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce the tensors of all ranks. The result is this rank's share of the rows.

    If the rows can't be divided evenly, the first ranks get one more row. ``op`` must be Average or
    Sum. The other arguments are the same as in ``allreduce_async``.

    Raises:
        NotImplementedError: If ``op`` is neither Average nor Sum.
    """
    op = choose_op(op)
    if op not in (Average, Sum):
        raise NotImplementedError(f"op of reducescatter must be Sum or Average, got {op.name}.")
    array = scale(array_of(tensor), float(prescale_factor))
    # The engine averages floating types only.
    integer_average = op is Average and array.dtype.kind in "iu"
    engine_op: EngineOp = "sum" if integer_average or op is Sum else "average"

    def scatter() -> np.ndarray:
        engine = process_set.collectives()
        factor = postscale_factor / engine.size if integer_average else postscale_factor
        result = engine.reduce_scatter(array, engine_op, name=name or "")
        return scale(result, float(factor))

    return Handle(scatter, lambda result: tensor_of(result, tensor))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce the tensors of all ranks, and return this rank's share of the rows.

    ``compression`` is the data type in which the tensor is sent, such as ``Compression.fp16``. The
    other arguments are the same as in ``reducescatter_async``.

    Raises:
        MismatchError: If shapes or types differ between ranks.
    """
    factors = prescale_factor, postscale_factor

    def forward(value: torch.Tensor) -> list[torch.Tensor]:
        return [synchronize(reducescatter_async(value, name, op, process_set, *factors))]

    def backward(upstream: torch.Tensor) -> list[torch.Tensor]:
        ranks = process_set.collectives().size if op == Sum else 1
        label = f"gradient of {name or 'reducescatter'}"
        scaled = scale(array_of(upstream), float(prescale_factor * postscale_factor * ranks))
        rows = calls.run(lambda: process_set.collectives().allgather(scaled, name=label))
        return [tensor_of(rows, upstream)]

    packed, context = compression.compress(tensor)
    (share,) = differentiable(forward, backward, [packed])
    return compression.decompress(share, context)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start ``reducescatter`` for each of several tensors."""
    arguments = name, op, process_set, prescale_factor, postscale_factor
    return all_of([reducescatter_async(tensor, *arguments) for tensor in tensors])


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Call ``reducescatter`` on each of several tensors."""
    arguments = name, compression, op, process_set, prescale_factor, postscale_factor
    return [reducescatter(tensor, *arguments) for tensor in tensors]
