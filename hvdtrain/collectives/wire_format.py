"""Smaller forms in which float32 arrays cross between hosts."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod

import ml_dtypes
import numpy as np

__all__ = ["WireFormat", "wire_format"]


class WireFormat(ABC):
    """Turns flat float32 arrays into bytes and back, with a loss.

    What comes back depends on the values alone, not on when or by which rank they are sent.
    """

    @abstractmethod
    def nbytes(self, items: int) -> int:
        """Return how many bytes so many values take."""

    @abstractmethod
    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write the values into bytes, ``nbytes`` of them."""

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Write what such bytes stand for into float32 values."""


class _Cast(WireFormat):
    """Values of a half type; what is too large for it becomes infinite."""

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
    """Whole numbers from -127 to 127, and for each block of values what the largest stands for.

    Values are rounded up or down with the chances that make their mean right (Alistarh et al. 2017,
    "QSGD"), so that errors of many ranks and steps cancel each other. The chances are drawn from a
    table, at a place that follows from the values: a training that is repeated is the same.
    """

    _BLOCK = 1024
    _TABLE = 1 << 16
    _MOST = 127

    @functools.cached_property
    def _chances(self) -> np.ndarray:
        # Not as the module is imported: few jobs need it.
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
            # In a block without a scale all is zero, or the scale says that it is not finite.
            factors = np.divide(self._MOST, scales, out=np.zeros_like(scales), where=scales > 0)
            whole = values * self._spread(factors, values.size)
            whole += self._chances_for(values)
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

    def _spread(self, of_blocks: np.ndarray, items: int) -> np.ndarray:
        """Return for each value what belongs to its block."""
        return np.repeat(of_blocks, self._BLOCK)[:items]

    def _chances_for(self, values: np.ndarray) -> np.ndarray:
        first = zlib.crc32(values.tobytes()) % self._TABLE
        times = -(-(first + values.size) // self._TABLE)
        return np.tile(self._chances, times)[first : first + values.size]


_FORMATS: dict[str, WireFormat | None] = {
    "none": None,
    "fp16": _Cast(np.dtype(np.float16)),
    "bf16": _Cast(np.dtype(ml_dtypes.bfloat16)),
    "int8": _Int8(),
}


def wire_format(name: str) -> WireFormat | None:
    """The form of this name: fp16, bf16 or int8; None for ``"none"``."""
    return _FORMATS[name]
