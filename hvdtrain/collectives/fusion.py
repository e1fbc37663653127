"""Fusion of several arrays into one flat sequence of chunks, and reusable buffers."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "ALIGNMENT_BYTES",
    "BufferPool",
    "Chunk",
    "FusedArray",
    "FusionLayout",
    "Scratch",
    "aligned",
    "empty_outputs",
    "fill_buckets",
    "join_bytes",
    "messages_of",
    "pack",
    "plan_fusion",
    "split_bytes",
    "split_evenly",
    "unpack",
]

# TensorFlow uses a NumPy array without a copy only if it has this alignment.
ALIGNMENT_BYTES = 64
# MPI counts the items of a message in 32 bits.
MESSAGE_BYTES = 1 << 30
# A piece of this size stays in the core's own cache during all operations on the piece.
PIECE_BYTES = 256 << 10


def aligned(nbytes: int) -> int:
    """Round up to a multiple of ``ALIGNMENT_BYTES``."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class FusedArray:
    """A piece of an array: ``arrays[index].flat[start:stop]`` is ``chunk[chunk_start:chunk_stop]``.

    In the buffer that contains all outputs, the piece is ``[output_start:output_stop]``.
    """

    index: int
    start: int
    stop: int
    chunk_start: int
    chunk_stop: int
    output_start: int
    output_stop: int


@dataclass(frozen=True)
class Chunk:
    """Part of the fused arrays that is reduced at once. Rank ``r`` combines ``shares[r]``."""

    items: int
    shares: tuple[tuple[FusedArray, ...], ...]

    @property
    def pieces(self) -> Iterator[FusedArray]:
        """The pieces of all ranks, in rank order."""
        return itertools.chain.from_iterable(self.shares)


@dataclass(frozen=True)
class FusionLayout:
    """The arrangement of arrays in chunks.

    Positions in pieces are given in items, but ``output_starts`` contains the position of each
    output in bytes.
    """

    shapes: tuple[tuple[int, ...], ...]
    chunks: tuple[Chunk, ...]
    output_starts: tuple[int, ...]
    output_bytes: int


@functools.lru_cache(maxsize=256)
def plan_fusion(
    shapes: tuple[tuple[int, ...], ...], itemsize: int, chunk_items: int, shares: int = 1
) -> FusionLayout:
    """Return the layout of concatenated arrays that are cut into chunks.

    Each chunk has at most ``chunk_items`` items, and is divided evenly into ``shares``. If all
    arrays are empty, the layout has one empty chunk.
    """
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    piece_items = PIECE_BYTES // itemsize
    output_starts = [0]
    for size in sizes:
        output_starts.append(output_starts[-1] + aligned(size * itemsize))
    array_starts = [0, *itertools.accumulate(sizes)]
    firsts = [start // itemsize for start in output_starts]
    chunks = []
    for begin in range(0, max(1, total), chunk_items):
        items = min(chunk_items, total - begin)
        chunks.append(
            Chunk(
                items,
                tuple(
                    tuple(_cut(array_starts, firsts, begin, begin + a, begin + b, piece_items))
                    for a, b in split_evenly(items, shares)
                ),
            )
        )
    return FusionLayout(shapes, tuple(chunks), tuple(output_starts[:-1]), output_starts[-1])


def _cut(
    array_starts: Sequence[int],
    output_starts: Sequence[int],
    origin: int,
    start: int,
    stop: int,
    piece_items: int,
) -> Iterator[FusedArray]:
    """Yield the pieces between two positions. They belong to a chunk that starts at ``origin``."""
    index = bisect.bisect_right(array_starts, start) - 1
    while start < stop:
        if start == array_starts[index + 1]:
            index += 1
            continue
        end = min(stop, array_starts[index + 1], start + piece_items)
        first, output = array_starts[index], output_starts[index] - array_starts[index]
        yield FusedArray(
            index,
            start - first,
            end - first,
            start - origin,
            end - origin,
            output + start,
            output + end,
        )
        start = end


def pack(pieces: Iterable[FusedArray], arrays: Sequence[np.ndarray], chunk: np.ndarray) -> None:
    """Copy pieces from flat arrays to a chunk."""
    for piece in pieces:
        chunk[piece.chunk_start : piece.chunk_stop] = arrays[piece.index][piece.start : piece.stop]


def unpack(pieces: Iterable[FusedArray], chunk: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy pieces from a chunk to flat arrays, and convert them to the dtype of the arrays."""
    for piece in pieces:
        part = chunk[piece.chunk_start : piece.chunk_stop]
        np.copyto(arrays[piece.index][piece.start : piece.stop], part, casting="unsafe")


def fill_buckets(
    indices: Sequence[int], sizes: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Divide arrays into buckets of at least ``bucket_bytes``. Return the indices in each bucket.

    ``sizes`` contains the bytes of each array. The first bucket contains the last arrays, because
    the gradients of the last variables are computed first.
    """
    buckets: list[list[int]] = []
    filled_bytes = bucket_bytes
    for index in reversed(indices):
        if filled_bytes >= bucket_bytes:
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(index)
        filled_bytes += sizes[index]
    return buckets


@functools.lru_cache(maxsize=4096)
def split_evenly(items: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Divide ``items`` into almost equal ranges: 5 items in 2 parts give (0, 3), (3, 5)."""
    share, rest = divmod(items, parts)
    starts = [part * share + min(part, rest) for part in range(parts + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(parts))


def messages_of(array: np.ndarray) -> list[np.ndarray]:
    """Cut the bytes of a contiguous array into messages that are small enough for MPI."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[s : s + MESSAGE_BYTES] for s in range(0, flat.size, MESSAGE_BYTES)]


def join_bytes(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Concatenate the bytes of all arrays."""
    rows = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays.values()]
    return np.concatenate(rows)


def split_bytes(row: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split the result of ``join_bytes`` into views with the shapes and dtypes of ``like``."""
    parts = {}
    start = 0
    for key, array in like.items():
        part = row[start : start + array.nbytes]
        parts[key] = part.view(array.dtype).reshape(array.shape)
        start += array.nbytes
    return parts


class Scratch:
    """Reusable working memory, with one buffer per use. A buffer grows as needed."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, use: str, dtype: np.dtype, items: int) -> np.ndarray:
        """Return an uninitialized flat array, valid until the next call for this use."""
        nbytes = items * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[use] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


class BufferPool:
    """Result buffers that are reused once no view of them exists.

    Getting new pages from the kernel takes longer than a reduction. A training loop drops the
    gradients of a step before it needs memory for the next gradients, so it gets the same memory
    again. NumPy views hold a reference to the array that owns the memory, and ``take`` checks the
    number of references.

    Args:
        max_idle: Number of unused buffers to keep.
        empty: Function that allocates a flat uint8 array.
        drop: Function that is called with each array that the pool discards.
    """

    def __init__(
        self,
        max_idle: int = 4,
        empty: Callable[[int], np.ndarray] = lambda nbytes: np.empty(nbytes, np.uint8),
        drop: Callable[[np.ndarray], None] = lambda buffer: None,
    ) -> None:
        self._buffers: list[np.ndarray] = []
        self._max_idle = max_idle
        self._empty, self._drop = empty, drop

    def take(self, nbytes: int) -> np.ndarray:
        """Return an unused, aligned, flat uint8 array."""
        best = -1
        for position in range(len(self._buffers)):
            fits = nbytes <= self._capacity(position) <= 2 * nbytes + 4096
            better = best < 0 or self._capacity(position) < self._capacity(best)
            if fits and better and self._is_idle(position):
                best = position
        if best < 0:
            self._drop_idle()
            self._buffers.append(self._empty(nbytes + ALIGNMENT_BYTES))
            best = len(self._buffers) - 1
        owner = self._buffers[best]
        offset = -owner.ctypes.data % ALIGNMENT_BYTES
        return owner[offset : offset + nbytes]

    def held(self) -> list[np.ndarray]:
        """Return the buffers in use."""
        positions = range(len(self._buffers))
        return [self._buffers[p] for p in positions if not self._is_idle(p)]

    def _capacity(self, position: int) -> int:
        return self._buffers[position].size - ALIGNMENT_BYTES

    def _is_idle(self, position: int) -> bool:
        # One reference from the list, and one from the argument of getrefcount.
        return sys.getrefcount(self._buffers[position]) == 2

    def _drop_idle(self) -> None:
        idle = [p for p in range(len(self._buffers)) if self._is_idle(p)]
        for position in reversed(idle[: max(0, len(idle) - self._max_idle + 1)]):
            self._drop(self._buffers.pop(position))


def empty_outputs(
    buffer: np.ndarray, layout: FusionLayout, dtype: np.dtype
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Return arrays in ``buffer`` with the shapes of the layout, and flat views of them."""
    flat = []
    for shape, start in zip(layout.shapes, layout.output_starts):
        nbytes = math.prod(shape) * dtype.itemsize
        flat.append(buffer[start : start + nbytes].view(dtype))
    return [view.reshape(shape) for view, shape in zip(flat, layout.shapes)], flat
