"""The sharding of a model's variables among parameter servers.

The concatenated variables are cut into ranges of nearly equal size in bytes, one for each server. A
shard consists of the pieces of variables in one range. All pieces of a shard are stored in one flat
buffer, which is sent without conversion.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from hvdtrain.collectives.fusion import aligned
from hvdtrain.errors import ConfigurationError, ModelError

__all__ = [
    "Shard",
    "Spec",
    "VariableSlice",
    "assemble",
    "numpy_dtype",
    "shard_variables",
    "specs_of",
]

# Rows that are larger than this fraction of a shard are cut, to balance the shards.
_LARGEST_ROW = 0.02


class Spec(NamedTuple):
    """The path, shape and dtype, such as ``bfloat16``, of a trainable variable."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The number of elements in a row. It is 1 for a vector or a scalar."""
        return math.prod(self.shape[1:])

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * self.itemsize


@dataclass(frozen=True)
class VariableSlice:
    """Elements ``[start, stop)`` of a flattened variable."""

    variable: int  # the index of the variable
    start: int
    stop: int
    # ``(rows, ...)`` if the slice consists of whole rows, the variable's shape if the slice is the
    # complete variable, and ``(stop - start,)`` otherwise
    shape: tuple[int, ...]
    dtype: str
    offset: int  # Position in the shard's buffer in bytes. It is a multiple of ``ALIGNMENT_BYTES``.

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return (self.stop - self.start) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Shard:
    """The pieces of variables that one server holds.

    The pieces are stored in a buffer of ``nbytes`` bytes. Variables without elements are in no
    shard.
    """

    pieces: tuple[VariableSlice, ...]
    nbytes: int

    def views(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Return views of the pieces in ``buffer``, uint8 of shape ``(nbytes,)``."""
        return [
            buffer[piece.offset : piece.offset + piece.nbytes]
            .view(numpy_dtype(piece.dtype))
            .reshape(piece.shape)
            for piece in self.pieces
        ]

    def pack(self, arrays: Sequence[np.ndarray], buffer: np.ndarray) -> None:
        """Copy this shard's part of all variables to ``buffer``."""
        for piece, view in zip(self.pieces, self.views(buffer)):
            view.reshape(-1)[...] = arrays[piece.variable].reshape(-1)[piece.start : piece.stop]


def specs_of(variables: Iterable[Any]) -> tuple[Spec, ...]:
    """Return the specs of Keras variables."""
    return tuple(Spec(v.path, tuple(int(n) for n in v.shape), str(v.dtype)) for v in variables)


def shard_variables(
    specs: Sequence[Spec], servers: int, whole: Collection[int] = ()
) -> tuple[Shard, ...]:
    """Divide variables into a shard for each server, of nearly equal size in bytes.

    Variables are cut between rows, so that each row is on one server. If rows are so large that the
    shards would be unbalanced, variables are also cut within rows. Variables whose indices are in
    ``whole`` are not cut. They are assigned first, from the largest to the smallest, each to the
    server with the fewest bytes so far. The other variables are then divided so that the shards
    become equally large.

    Raises:
        ConfigurationError: If there are too many servers for the variables.
        ModelError: If the model has no trainable variables with elements.
    """
    kept = sorted((i for i in set(whole) if specs[i].size), key=lambda i: (-specs[i].nbytes, i))
    loose = [i for i, spec in enumerate(specs) if spec.size and i not in set(kept)]
    _check_servers(servers, sum(specs[i].size for i in loose), len(kept))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for i in kept:
        server = loads.index(min(loads))
        parts[server].append((i, 0, specs[i].size))
        loads[server] += specs[i].nbytes
    sequence = _Sequence(specs, loose, sum(spec.nbytes for spec in specs) / servers)
    for part, (first, last) in zip(parts, _ranges(sequence, loads)):
        part.extend(sequence.between(first, last))
    return tuple(_lay_out(specs, sorted(part)) for part in parts)


def assemble(
    specs: Sequence[Spec], shards: Sequence[Shard], buffers: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return all variables from the buffers of all shards, as views if they were not cut."""
    arrays: dict[int, np.ndarray] = {}
    for shard, buffer in zip(shards, buffers):
        for piece, view in zip(shard.pieces, shard.views(buffer)):
            spec = specs[piece.variable]
            if view.size == spec.size:
                arrays[piece.variable] = view
                continue
            if piece.variable not in arrays:
                arrays[piece.variable] = np.empty(spec.shape, view.dtype)
            flat = arrays[piece.variable].reshape(-1)
            flat[piece.start : piece.stop] = view.reshape(-1)
    # Variables without elements are in no shard.
    return [
        arrays[number] if number in arrays else np.empty(spec.shape, numpy_dtype(spec.dtype))
        for number, spec in enumerate(specs)
    ]


class _Sequence:
    """The elements of the variables ``members``, one variable after another."""

    def __init__(self, specs: Sequence[Spec], members: Sequence[int], shard_bytes: float) -> None:
        self._specs = specs
        self._members = members
        self._shard_bytes = shard_bytes  # of an average shard
        self._items = [0, *itertools.accumulate(specs[i].size for i in members)]
        self._bytes = [0, *itertools.accumulate(specs[i].nbytes for i in members)]
        self.items, self.nbytes = self._items[-1], self._bytes[-1]

    def nearest(self, byte: float) -> int:
        """Return the index of the element at which to cut, with about ``byte`` bytes before it."""
        at = bisect.bisect_right(self._bytes, byte) - 1
        if at >= len(self._members):
            return self.items
        spec = self._specs[self._members[at]]
        row_bytes = spec.row * spec.itemsize
        unit = spec.row if row_bytes <= _LARGEST_ROW * self._shard_bytes else 1
        units = round((byte - self._bytes[at]) / (unit * spec.itemsize))
        return self._items[at] + min(units * unit, spec.size)

    def between(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the variable, first and last element of each piece in ``[first, last)``."""
        at = bisect.bisect_right(self._items, first) - 1
        while first < last:
            stop = min(last, self._items[at + 1])
            yield self._members[at], first - self._items[at], stop - self._items[at]
            first = stop
            at += 1


def _ranges(sequence: _Sequence, loads: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield a range of elements for each server, to fill servers with ``loads`` bytes equally."""
    # A server without any load gets at least one element.
    needs = [0 if load else 1 for load in loads]
    # Bytes to which the servers with the smallest loads can be filled.
    below = enumerate(itertools.accumulate(sorted(loads)), 1)
    level = min((sequence.nbytes + nbytes) / count for count, nbytes in below)
    start, byte = 0, 0.0
    for server, load in enumerate(loads):
        byte += max(0.0, level - load)
        most = sequence.items - sum(needs[server + 1 :])
        stop = min(max(sequence.nearest(byte), start + needs[server]), most)
        if server == len(loads) - 1:
            stop = sequence.items
        yield start, stop
        start = stop


def _lay_out(specs: Sequence[Spec], parts: Iterable[tuple[int, int, int]]) -> Shard:
    pieces = []
    offset = 0
    for variable, start, stop in parts:
        spec = specs[variable]
        if stop - start == spec.size:
            shape = spec.shape
        elif start % spec.row == 0 and stop % spec.row == 0:
            shape = ((stop - start) // spec.row, *spec.shape[1:])
        else:
            shape = (stop - start,)
        piece = VariableSlice(variable, start, stop, shape, spec.dtype, offset)
        pieces.append(piece)
        offset += aligned(piece.nbytes)
    return Shard(tuple(pieces), offset)


def _check_servers(servers: int, elements: int, kept: int) -> None:
    if not elements + kept:
        raise ModelError(
            "Parameter servers need trainable variables with elements, and the model has none; "
            "build the model, and leave some of its layers trainable."
        )
    if not 1 <= servers <= elements + kept:
        raise ConfigurationError(
            f"The number of parameter servers must be between 1 and {elements + kept}, got "
            f"{servers}: the model has {elements} elements that can be divided and {kept} "
            "variables that can't be split."
        )


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a Keras dtype name, such as ``bfloat16``."""
    return np.dtype(getattr(ml_dtypes, name, name))
