"""Horovod's reduction operations, such as ``Average``, for all frameworks."""

from __future__ import annotations

import enum
from typing import cast

from hvdtrain.gradients.array_reduction import TensorOp

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "choose_op",
]


class ReduceOp(enum.IntEnum):
    """A reduction operation, with the number that Horovod assigns to it."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @property
    def tensor_op(self) -> TensorOp:
        """The name of the operation in ``hvdtrain.gradients``."""
        return cast("TensorOp", self.name.lower())


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def choose_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """Return the reduction that the argument ``op`` or the deprecated argument ``average`` selects.

    The default is Average.

    Raises:
        ValueError: If both arguments are given, or if ``op`` is not a reduction.
    """
    if op is not None and average is not None:
        raise ValueError(
            f"op and average can't be combined, got op={op!r} and average={average!r}; leave out "
            "average, which is deprecated."
        )
    if op is None:
        return Sum if average is False else Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(entry.name for entry in ReduceOp)
        raise ValueError(f"op must be one of {names}, got {op!r}.") from None
