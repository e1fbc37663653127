"""Options for the reduction of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.gradients.array_reduction import TensorOp
from hvdtrain.gradients.compression import Compression, Compressor

__all__ = ["ExchangeOptions", "Groups", "ReduceOptions"]

Groups = int | Sequence[Sequence[Any]] | None
"""Number of groups, or lists of variables. With None, gradients are divided into buckets."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of ``gradients.allreduce.exchange``.

    Attributes:
        op: The operation.
        compression: Class that converts tensors to the dtype in which they are sent.
        prescale: Factor for the inputs.
        postscale: Factor for the results.
        device_dense: Device on which tensors are combined; "" for TensorFlow's default.
        device_sparse: Device on which ``tf.IndexedSlices`` are combined; "" for the default.
    """

    op: TensorOp = "average"
    compression: type[Compressor] = Compression.none
    prescale: float = 1.0
    postscale: float = 1.0
    device_dense: str = ""
    device_sparse: str = ""


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """Options of a ``GradientReducer``.

    Attributes:
        non_finite: With ``"error"``, every rank raises an error if a gradient contains NaN or
            infinity. The error names the rank and the variable. ``"ignore"`` allows such gradients.
        wire: Format in which float32 data is sent between hosts: a name that ``wire_format``
            accepts.
        powersgd_rank: Rank of the matrices for PowerSGD. 0 means no compression.
        unchecked: If set, gradients are combined by ``exchange``, as in Horovod. Then the result is
            differentiable, but names and values are not checked.
        sparse_as_dense: Whether to convert ``tf.IndexedSlices`` to tensors first.
        groups: Number of groups, or lists of variables to combine together.
        scale_local: Whether to divide the gradients of local variables by the number of ranks.
        what: What is averaged, for error messages: ``"gradient"`` or ``"weight"``.

    Raises:
        ValueError: If ``groups`` is invalid.
    """

    non_finite: str = "error"
    wire: str = "none"
    powersgd_rank: int = 0
    unchecked: ExchangeOptions | None = None
    sparse_as_dense: bool = False
    groups: Groups = None
    scale_local: bool = True
    what: str = "gradient"

    def __post_init__(self) -> None:
        lists = isinstance(self.groups, Sequence) and not isinstance(self.groups, str)
        if not (self.groups is None or lists or (type(self.groups) is int and self.groups > 0)):
            raise ValueError(
                "groups must be a positive number or a list of lists of variables, got "
                f"{self.groups!r}."
            )

    def divide(
        self,
        indices: Sequence[int],
        variables: Sequence[Any],
        sizes: Sequence[int],
        bucket_bytes: int,
    ) -> list[list[int]]:
        """Divide variables with gradients into groups, and return the indices in each group.

        By default, the groups are buckets of at least ``bucket_bytes``. The first bucket contains
        the last variables, because their gradients are available first. ``sizes`` contains the
        bytes of each gradient, or 0 if unknown.
        """
        if self.groups is None:
            return _buckets(indices, sizes, bucket_bytes)
        if isinstance(self.groups, int):
            count = min(self.groups, len(indices))
            ends = [len(indices) * (n + 1) // count for n in range(count)]
            return [list(indices[a:b]) for a, b in zip([0, *ends], ends)]
        rest = {id(variables[n]): n for n in indices}
        groups = [[rest.pop(id(v)) for v in group if id(v) in rest] for group in self.groups]
        return [group for group in (*groups, *([n] for n in rest.values())) if group]


def _buckets(indices: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    if not bucket_bytes or not indices:
        return [list(indices)] if indices else []
    buckets: list[list[int]] = [[]]
    nbytes = 0
    for index in reversed(indices):
        if nbytes >= bucket_bytes:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(index)
        nbytes += sizes[index]
    return buckets
