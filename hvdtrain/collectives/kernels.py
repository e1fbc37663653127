"""The arithmetic of a reduction on flat NumPy arrays, without communication.

Results are bitwise identical on all ranks and reproducible from run to run, because contributions
are combined in rank order, and only one rank computes each element.
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
    "finish_average",
    "is_floating",
    "reduce_flat",
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
    """Return whether gradients can have this dtype: float16, bfloat16, float32 or float64."""
    return dtype in _FLOATING


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype for sums: float32 for float16 and bfloat16, otherwise ``dtype`` itself."""
    return np.dtype(np.float32) if dtype in _HALF else dtype


def widen(values: np.ndarray) -> np.ndarray:
    """Convert an array to its accumulator dtype, without a copy if it has that dtype."""
    return values.astype(accumulator_dtype(values.dtype), copy=False)


def check_reducible(dtype: np.dtype, op: ReduceOp) -> None:
    """Check that an operation is defined for a dtype.

    Raises:
        ConfigurationError: If the operation is unknown, or not defined for ``dtype``.
    """
    if op not in OPS:
        raise ConfigurationError(f"op must be one of {', '.join(OPS)}, got {op!r}.")
    if not is_floating(dtype) and dtype.kind not in "iub":
        raise ConfigurationError(
            "Reductions need float16, bfloat16, float32, float64, an integer dtype or bool, got "
            f"{dtype}."
        )
    if op == "average" and not is_floating(dtype):
        raise ConfigurationError(
            f"op='average' needs a floating dtype, got {dtype}; use op='sum' and divide, or "
            "convert the array first."
        )
    if dtype.kind == "b" and op == "sum":
        raise ConfigurationError(
            "op='sum' is not defined for bool; use 'max' for any, 'min' for all, or convert to an "
            "integer dtype to count."
        )


def combine(
    contributions: Sequence[np.ndarray],
    op: ReduceOp,
    out: np.ndarray,
    scratch: np.ndarray | None = None,
) -> None:
    """Combine flat arrays in rank order.

    For ``average``, this computes only the sum, and ``finish_average`` divides it. ``out`` has the
    accumulator dtype, and may be the same array as the first contribution. If the contributions
    have a different dtype, ``scratch`` is needed: an array of the accumulator dtype that is at
    least as long as ``out``.
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
    assert scratch is not None
    widened = scratch[: out.size]
    for contribution in contributions[1:]:
        np.copyto(widened, contribution, casting="unsafe")
        ufunc(out, widened, out=out)


def finish_average(out: np.ndarray, op: ReduceOp, size: int) -> None:
    """Divide a sum by ``size`` in place if the operation is ``average``."""
    if op == "average":
        np.multiply(out, out.dtype.type(1.0 / size), out=out)


def reduce_flat(contributions: Sequence[np.ndarray], op: ReduceOp, size: int) -> np.ndarray:
    """Reduce flat arrays, one per rank, and return the result in the accumulator dtype."""
    wide = accumulator_dtype(contributions[0].dtype)
    total = np.empty(contributions[0].size, wide)
    combine(contributions, op, total, np.empty_like(total))
    finish_average(total, op, size)
    return total


class FiniteCheck:
    """Checks results for NaN and infinity piece by piece, while they are in the cache.

    ``dtype`` is the dtype to which results are converted at the end. This dtype matters because
    sums of float16 arrays are computed in float32, and may overflow when they are converted back to
    float16.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.passed = True
        self._dtype = dtype
        self._needed = is_floating(dtype)
        self._flags = np.empty(0, bool)

    def check(self, array: np.ndarray) -> None:
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
