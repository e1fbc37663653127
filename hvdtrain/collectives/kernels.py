"""The arithmetic of a reduction, on NumPy views; no communication.

Contributions are combined in rank order, each element on one rank only, which is what makes
results bitwise equal everywhere and repeatable from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from hvdtrain.errors import ConfigurationError

__all__ = [
    "OPS",
    "FiniteCheck",
    "ReduceOp",
    "accumulator_dtype",
    "check_reducible",
    "combine",
    "combined",
    "finish",
    "is_floating",
    "widen",
]

ReduceOp = Literal["sum", "average", "min", "max", "product"]

OPS: tuple[ReduceOp, ...] = ("sum", "average", "min", "max", "product")

_HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_FLOATING = (*_HALF, np.dtype(np.float32), np.dtype(np.float64))
_UFUNCS = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


def is_floating(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is one of the floating types that gradients have."""
    return dtype in _FLOATING


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """The type that ``dtype`` is combined in: float32 for half types, else itself."""
    return np.dtype(np.float32) if dtype in _HALF else dtype


def widen(values: np.ndarray) -> np.ndarray:
    """``values`` in the type that they are combined in; themselves where that is their own."""
    return values.astype(accumulator_dtype(values.dtype), copy=False)


def check_reducible(dtype: np.dtype, op: ReduceOp) -> None:
    """Refuse what has no meaning as a reduction.

    Raises:
        ConfigurationError: An unknown ``op``, a type that is no number, ``average`` of whole
            numbers, or ``sum`` of bool.
    """
    if op not in OPS:
        raise ConfigurationError(f"op={op!r} is not known; expected one of {', '.join(OPS)}.")
    if not is_floating(dtype) and dtype.kind not in "iub":
        raise ConfigurationError(
            f"Arrays of type {dtype} can't be reduced; expected float16, bfloat16, float32, "
            "float64, an integer type or bool."
        )
    if op == "average" and not is_floating(dtype):
        raise ConfigurationError(
            f"op='average' of {dtype} would lose the fraction; use op='sum' and divide, or "
            "convert to a floating type first."
        )
    if dtype.kind == "b" and op == "sum":
        raise ConfigurationError(
            "op='sum' of bool is not defined; use 'max' for any, 'min' for all, or convert to "
            "an integer type to count."
        )


def combine(
    contributions: Sequence[np.ndarray],
    op: ReduceOp,
    out: np.ndarray,
    scratch: np.ndarray | None = None,
) -> None:
    """Combine flat arrays in their order into ``out``.

    Args:
        contributions: One flat array per rank, same length and type.
        op: ``average`` sums here; ``finish`` divides.
        out: Flat array of the accumulator type, same length; may be the first contribution.
        scratch: Flat array of the accumulator type, at least as long; needed where the
            accumulator type differs from the contributions' type.
    """
    if out.dtype.kind == "b":
        contributions = [c.view(np.uint8) for c in contributions]
        out = out.view(np.uint8)
    ufunc = _UFUNCS[op]
    if out.dtype == contributions[0].dtype:
        if len(contributions) == 1:
            np.copyto(out, contributions[0])
            return
        ufunc(contributions[0], contributions[1], out=out)
        for contribution in contributions[2:]:
            ufunc(out, contribution, out=out)
        return
    np.copyto(out, contributions[0], casting="unsafe")
    assert scratch is not None  # the engines allocate one for every half type
    widened = scratch[: out.size]
    for contribution in contributions[1:]:
        np.copyto(widened, contribution, casting="unsafe")
        ufunc(out, widened, out=out)


def finish(out: np.ndarray, op: ReduceOp, size: int) -> None:
    """Turn the sum over ``size`` ranks into the average, in place, where that was asked for."""
    if op == "average":
        np.multiply(out, out.dtype.type(1.0 / size), out=out)


def combined(contributions: Sequence[np.ndarray], op: ReduceOp, size: int) -> np.ndarray:
    """Return what ``combine`` and ``finish`` make of flat arrays; of the accumulator type."""
    wide = accumulator_dtype(contributions[0].dtype)
    total = np.empty(contributions[0].size, wide)
    combine(contributions, op, total, np.empty_like(total))
    finish(total, op, size)
    return total


class FiniteCheck:
    """Looks at results piece by piece, while they are in the cache, for NaN and infinity.

    Args:
        dtype: The type of the results as the caller gets them; a half type overflows earlier than
            float32, in which they are added up.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.passed = True
        self._dtype = dtype
        self._needed = is_floating(dtype)
        self._flags = np.empty(0, bool)

    def look(self, array: np.ndarray) -> None:
        """Check a flat array."""
        if not self._needed:
            return
        if array.dtype != self._dtype:
            with np.errstate(over="ignore"):
                array = array.astype(self._dtype)
        if self._flags.size < array.size:
            self._flags = np.empty(array.size, bool)
        flags = self._flags[: array.size]
        np.isfinite(array, out=flags)
        self.passed = self.passed and bool(flags.all())
