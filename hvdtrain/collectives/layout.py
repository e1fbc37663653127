"""How several arrays become one flat sequence, and how that is cut into chunks."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "ALIGNMENT_BYTES",
    "BufferPool",
    "Layout",
    "Piece",
    "empty_outputs",
    "plan_layout",
    "split_evenly",
]

# TensorFlow takes over a NumPy array without copying it only at this alignment.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """``arrays[index].flat[start:stop]`` lies at ``[chunk_start:chunk_stop]`` of its chunk."""

    index: int
    start: int
    stop: int
    chunk_start: int
    chunk_stop: int


@dataclass(frozen=True)
class Layout:
    """Shapes cut into chunks of at most ``chunk_items`` items; all counts are items, not bytes."""

    shapes: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[Piece, ...], ...]
    chunk_sizes: tuple[int, ...]
    output_starts: tuple[int, ...]
    output_bytes: int


@functools.lru_cache(maxsize=256)
def plan_layout(shapes: tuple[tuple[int, ...], ...], itemsize: int, chunk_items: int) -> Layout:
    """Lay arrays end to end and cut the sequence; a group without items is one empty chunk."""
    chunks: list[tuple[Piece, ...]] = []
    sizes: list[int] = []
    pieces: list[Piece] = []
    filled = 0
    output_starts: list[int] = []
    output_bytes = 0
    for index, shape in enumerate(shapes):
        items = math.prod(shape)
        output_starts.append(output_bytes)
        output_bytes += -(-items * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        start = 0
        while start < items:
            stop = min(items, start + chunk_items - filled)
            pieces.append(Piece(index, start, stop, filled, filled + stop - start))
            filled += stop - start
            start = stop
            if filled == chunk_items:
                chunks.append(tuple(pieces))
                sizes.append(filled)
                pieces, filled = [], 0
    if pieces or not chunks:
        chunks.append(tuple(pieces))
        sizes.append(filled)
    return Layout(shapes, tuple(chunks), tuple(sizes), tuple(output_starts), output_bytes)


@functools.lru_cache(maxsize=4096)
def split_evenly(items: int, parts: int) -> tuple[tuple[int, int], ...]:
    """``parts`` ranges that cover ``items``; the first ``items % parts`` hold one more."""
    share, rest = divmod(items, parts)
    starts = [part * share + min(part, rest) for part in range(parts + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(parts))


class BufferPool:
    """Result buffers that are used again once nobody holds a view of them any more.

    Fresh pages cost more than a reduction, so a training loop, which drops last step's
    gradients before it asks for the next, gets the same memory back. A caller that keeps a
    result keeps its buffer: NumPy's views hold a reference to the array that owns the memory,
    and the count of those references is what ``take`` looks at.
    """

    def __init__(self, max_idle: int = 4) -> None:
        self._buffers: list[np.ndarray] = []
        self._max_idle = max_idle

    def take(self, nbytes: int) -> np.ndarray:
        """A flat uint8 array of ``nbytes``, aligned, that no one else holds."""
        best = -1
        for position in range(len(self._buffers)):
            fits = nbytes <= self._capacity(position) <= 2 * nbytes + 4096
            better = best < 0 or self._capacity(position) < self._capacity(best)
            if fits and better and self._is_idle(position):
                best = position
        if best < 0:
            self._drop_idle()
            self._buffers.append(np.empty(nbytes + ALIGNMENT_BYTES, np.uint8))
            best = len(self._buffers) - 1
        owner = self._buffers[best]
        offset = -owner.ctypes.data % ALIGNMENT_BYTES
        return owner[offset : offset + nbytes]

    def _capacity(self, position: int) -> int:
        return self._buffers[position].size - ALIGNMENT_BYTES

    def _is_idle(self, position: int) -> bool:
        # The list holds one reference, getrefcount's argument the other.
        return sys.getrefcount(self._buffers[position]) == 2

    def _drop_idle(self) -> None:
        idle = [p for p in range(len(self._buffers)) if self._is_idle(p)]
        for position in reversed(idle[: max(0, len(idle) - self._max_idle + 1)]):
            del self._buffers[position]


def empty_outputs(
    pool: BufferPool, layout: Layout, dtype: np.dtype
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Arrays of the layout's shapes in one pooled buffer, and the same arrays flat."""
    buffer = pool.take(layout.output_bytes)
    flat = []
    for shape, start in zip(layout.shapes, layout.output_starts):
        nbytes = math.prod(shape) * dtype.itemsize
        flat.append(buffer[start : start + nbytes].view(dtype))
    return [view.reshape(shape) for view, shape in zip(flat, layout.shapes)], flat
