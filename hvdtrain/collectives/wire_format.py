"""Compressed formats in which float32 arrays are sent between hosts."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod

import ml_dtypes
import numpy as np

__all__ = ["WireFormat", "wire_format"]


class WireFormat(ABC):
    """Lossy conversion of flat float32 arrays to bytes and back.

    The result depends only on the values. Different ranks, and repeated runs, get the same bytes.
    """

    @abstractmethod
    def nbytes(self, items: int) -> int:
        """Return the encoded size of ``items`` values."""

    @abstractmethod
    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write encoded values to ``out``, a uint8 array of ``nbytes(values.size)`` items."""

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Write decoded float32 values to ``out``."""


class _Cast(WireFormat):
    """Conversion to float16 or bfloat16. Values out of range become infinite."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, items: int) -> int:
        return items * self._dtype.itemsize

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        with np.errstate(over="ignore"):
            np.copyto(out.view(self._dtype), values, casting="unsafe")

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, data.view(self._dtype), casting="unsafe")


class _Int8(WireFormat):
    """Integers from -127 to 127, with a float32 scale for each block of values.

    Stochastic rounding keeps the expected value (Alistarh et al. 2017, "QSGD"), so that errors
    average out over ranks and steps. Random numbers come from a fixed table, at an offset that is
    computed from the values. So repeated runs give the same results.
    """

    _BLOCK = 1024
    _TABLE = 1 << 16
    _MOST = 127

    @functools.cached_property
    def _random(self) -> np.ndarray:
        # Created on first use, because few jobs need it.
        return np.random.default_rng(0).random(self._TABLE, np.float32)

    def nbytes(self, items: int) -> int:
        return 4 * self._blocks(items) + items

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        if not values.size:
            return
        scales = out[: 4 * self._blocks(values.size)].view(np.float32)
        starts = np.arange(0, values.size, self._BLOCK)
        np.maximum.reduceat(np.abs(values), starts, out=scales)
        with np.errstate(invalid="ignore", over="ignore"):
            # If the scale of a block is not positive, all its values are zero or the scale is NaN.
            factors = np.divide(self._MOST, scales, out=np.zeros_like(scales), where=scales > 0)
            whole = values * self._spread(factors, values.size)
            whole += self._random_for(values)
            np.floor(whole, out=whole)
            np.clip(whole, -self._MOST, self._MOST, out=whole)
            np.copyto(out[scales.nbytes :].view(np.int8), whole, casting="unsafe")

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        scales = data[: 4 * self._blocks(out.size)].view(np.float32)
        with np.errstate(invalid="ignore"):
            steps = self._spread(scales / np.float32(self._MOST), out.size)
            np.multiply(data[scales.nbytes :].view(np.int8), steps, out=out)

    def _blocks(self, items: int) -> int:
        return -(-items // self._BLOCK)

    def _spread(self, per_block: np.ndarray, items: int) -> np.ndarray:
        """Repeat the value of each block for all items of the block."""
        return np.repeat(per_block, self._BLOCK)[:items]

    def _random_for(self, values: np.ndarray) -> np.ndarray:
        first = zlib.crc32(values.tobytes()) % self._TABLE
        times = -(-(first + values.size) // self._TABLE)
        return np.tile(self._random, times)[first : first + values.size]


_FORMATS: dict[str, WireFormat | None] = {
    "none": None,
    "fp16": _Cast(np.dtype(np.float16)),
    "bf16": _Cast(np.dtype(ml_dtypes.bfloat16)),
    "int8": _Int8(),
}


def wire_format(name: str) -> WireFormat | None:
    """Return the format with the name fp16, bf16 or int8. ``"none"`` gives None."""
    return _FORMATS[name]
