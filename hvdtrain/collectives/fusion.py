"""Fusion of several arrays into one flat sequence, which is cut into chunks."""

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
    "join_bytes",
    "messages_of",
    "pack",
    "plan_fusion",
    "split_bytes",
    "split_evenly",
    "unpack",
]

# TensorFlow takes over a NumPy array without copying it only at this alignment.
ALIGNMENT_BYTES = 64
# A message of MPI counts its items in 32 bits.
MESSAGE_BYTES = 1 << 30
# What is done to a piece, one thing after the other, stays within the core's own cache.
PIECE_BYTES = 256 << 10


def aligned(nbytes: int) -> int:
    """The least multiple of ``ALIGNMENT_BYTES`` that ``nbytes`` fit into."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class FusedArray:
    """``arrays[index].flat[start:stop]`` lies at ``[chunk_start:chunk_stop]`` of its chunk.

    Of the buffer with all outputs it is ``[output_start:output_stop]``.
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
    """The part that travels at a time; ``shares[r]`` are the pieces that rank ``r`` combines."""

    items: int
    shares: tuple[tuple[FusedArray, ...], ...]

    @property
    def pieces(self) -> Iterator[FusedArray]:
        """The pieces of all ranks, in their order."""
        return itertools.chain.from_iterable(self.shares)


@dataclass(frozen=True)
class FusionLayout:
    """Shapes cut into chunks of at most ``chunk_items`` items; all counts are items, not bytes."""

    shapes: tuple[tuple[int, ...], ...]
    chunks: tuple[Chunk, ...]
    output_starts: tuple[int, ...]
    output_bytes: int


@functools.lru_cache(maxsize=256)
def plan_fusion(
    shapes: tuple[tuple[int, ...], ...], itemsize: int, chunk_items: int, shares: int = 1
) -> FusionLayout:
    """Lay arrays end to end and cut the sequence; a group without items is one empty chunk.

    Args:
        shapes: The shapes of the arrays.
        itemsize: Bytes of an item.
        chunk_items: The most that a chunk holds.
        shares: Into how many even shares each chunk is divided.
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
                    tuple(
                        _cut(array_starts, firsts, begin, begin + start, begin + stop, piece_items)
                    )
                    for start, stop in split_evenly(items, shares)
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
    """The pieces of arrays between two positions of the sequence; ``origin`` is the chunk's."""
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
    """Copy pieces of flat ``arrays`` to their places in ``chunk``."""
    for piece in pieces:
        chunk[piece.chunk_start : piece.chunk_stop] = arrays[piece.index][piece.start : piece.stop]


def unpack(pieces: Iterable[FusedArray], chunk: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy pieces of ``chunk`` to their places in flat ``arrays``, in the arrays' type."""
    for piece in pieces:
        part = chunk[piece.chunk_start : piece.chunk_stop]
        np.copyto(arrays[piece.index][piece.start : piece.stop], part, casting="unsafe")


@functools.lru_cache(maxsize=4096)
def split_evenly(items: int, parts: int) -> tuple[tuple[int, int], ...]:
    """``parts`` ranges that cover ``items``; the first ``items % parts`` hold one more."""
    share, rest = divmod(items, parts)
    starts = [part * share + min(part, rest) for part in range(parts + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(parts))


def messages_of(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of a contiguous array, cut into what one message holds."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[s : s + MESSAGE_BYTES] for s in range(0, flat.size, MESSAGE_BYTES)]


def join_bytes(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The bytes of all arrays in one flat array."""
    rows = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays.values()]
    return np.concatenate(rows)


def split_bytes(row: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split what ``join_bytes`` returned into views of the shapes and types in ``like``."""
    parts = {}
    start = 0
    for key, array in like.items():
        part = row[start : start + array.nbytes]
        parts[key] = part.view(array.dtype).reshape(array.shape)
        start += array.nbytes
    return parts


class Scratch:
    """Working memory, one buffer for each use, which grows to the largest that was asked for."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, use: str, dtype: np.dtype, items: int) -> np.ndarray:
        """A flat array with whatever it held before; the next call for this use takes it over."""
        nbytes = items * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[use] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


def _empty(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class BufferPool:
    """Result buffers that are used again once nobody holds a view of them any more.

    Fresh pages cost more than a reduction, so a training loop, which drops last step's
    gradients before it asks for the next, gets the same memory back. A caller that keeps a
    result keeps its buffer: NumPy's views hold a reference to the array that owns the memory,
    and the count of those references is what ``take`` looks at.

    Args:
        max_idle: How many buffers that nobody holds are kept.
        empty: Makes a flat uint8 array of so many bytes.
        drop: Is given each of them that is kept no longer.
    """

    def __init__(
        self,
        max_idle: int = 4,
        empty: Callable[[int], np.ndarray] = _empty,
        drop: Callable[[np.ndarray], None] = lambda buffer: None,
    ) -> None:
        self._buffers: list[np.ndarray] = []
        self._max_idle = max_idle
        self._empty, self._drop = empty, drop

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
            self._buffers.append(self._empty(nbytes + ALIGNMENT_BYTES))
            best = len(self._buffers) - 1
        owner = self._buffers[best]
        offset = -owner.ctypes.data % ALIGNMENT_BYTES
        return owner[offset : offset + nbytes]

    def held(self) -> list[np.ndarray]:
        """The buffers that somebody holds."""
        positions = range(len(self._buffers))
        return [self._buffers[p] for p in positions if not self._is_idle(p)]

    def _capacity(self, position: int) -> int:
        return self._buffers[position].size - ALIGNMENT_BYTES

    def _is_idle(self, position: int) -> bool:
        # The list holds one reference, getrefcount's argument the other.
        return sys.getrefcount(self._buffers[position]) == 2

    def _drop_idle(self) -> None:
        idle = [p for p in range(len(self._buffers)) if self._is_idle(p)]
        for position in reversed(idle[: max(0, len(idle) - self._max_idle + 1)]):
            self._drop(self._buffers.pop(position))


def empty_outputs(
    buffer: np.ndarray, layout: FusionLayout, dtype: np.dtype
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Arrays of the layout's shapes in one buffer of its output bytes, and the same arrays flat."""
    flat = []
    for shape, start in zip(layout.shapes, layout.output_starts):
        nbytes = math.prod(shape) * dtype.itemsize
        flat.append(buffer[start : start + nbytes].view(dtype))
    return [view.reshape(shape) for view, shape in zip(flat, layout.shapes)], flat
