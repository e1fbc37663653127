"""The reduction operations (Average, Sum, ...), under Horovod's names."""

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
    """A reduction operation, by which values are combined; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @property
    def of_tensors(self) -> TensorOp:
        """The name that everything below Horovod's names has for it."""
        return cast("TensorOp", self.name.lower())


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def choose_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """Return the operation that ``op`` or the older ``average`` means; Average if neither is given.

    Raises:
        ValueError: Both are, or ``op`` is none.
    """
    if op is not None and average is not None:
        raise ValueError(
            f"Received op={op!r} and average={average!r}; expected one of them. average is the "
            "older name: leave it out."
        )
    if op is None:
        return Sum if average is False else Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(entry.name for entry in ReduceOp)
        raise ValueError(f"op={op!r} is no reduction; expected one of {names}.") from None
