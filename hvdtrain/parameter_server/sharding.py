"""Sharding of a model's variables among parameter servers, and a shard's layout in memory.

All variables, one after another, are cut into as many ranges as there are servers, of nearly the
same number of bytes. A range is a shard: pieces of variables in one flat buffer, which travels as
it is.
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

# Rows larger than this part of a shard are cut, or shards would differ too much.
_LARGEST_ROW = 0.02


class Spec(NamedTuple):
    """Path, shape and type of a trainable variable; ``dtype`` is a name such as ``bfloat16``."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The number of elements in a row; one for a vector or a scalar."""
        return math.prod(self.shape[1:])

    @property
    def itemsize(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True)
class VariableSlice:
    """Elements ``[start, stop)`` of a flattened variable, in a shard's buffer.

    Attributes:
        variable: The variable's number.
        shape: ``(rows, ...)`` where these are whole rows, that of the variable where it is whole,
            else ``(stop - start,)``.
        offset: Where it begins in the buffer, in bytes; a multiple of ``ALIGNMENT_BYTES``.
    """

    variable: int
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Shard:
    """The part of the variables that one server holds; ``nbytes`` is the size of its buffer.

    Variables without elements are part of no shard.
    """

    pieces: tuple[VariableSlice, ...]
    nbytes: int

    def views(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Returns the pieces within ``buffer``, uint8 of shape ``(nbytes,)``, without copies."""
        self.check(buffer)
        return [
            buffer[piece.offset : piece.offset + piece.nbytes]
            .view(numpy_dtype(piece.dtype))
            .reshape(piece.shape)
            for piece in self.pieces
        ]

    def pack(self, arrays: Sequence[np.ndarray], buffer: np.ndarray) -> None:
        """Copy this shard's part of whole variables, by number, to ``buffer``."""
        for piece, view in zip(self.pieces, self.views(buffer)):
            view.reshape(-1)[...] = arrays[piece.variable].reshape(-1)[piece.start : piece.stop]

    def check(self, buffer: np.ndarray) -> None:
        """Raise ValueError unless ``buffer`` can hold this shard."""
        if buffer.dtype != np.uint8 or buffer.shape != (self.nbytes,):
            raise ValueError(
                f"Expected a buffer of type uint8 and shape ({self.nbytes},), received "
                f"{buffer.dtype} {buffer.shape}."
            )


def specs_of(variables: Iterable[Any]) -> tuple[Spec, ...]:
    """Returns the specs of Keras variables."""
    return tuple(Spec(v.path, tuple(int(n) for n in v.shape), str(v.dtype)) for v in variables)


def shard_variables(
    specs: Sequence[Spec], servers: int, whole: Collection[int] = ()
) -> tuple[Shard, ...]:
    """Share out variables among servers, each as many bytes as the others.

    Cuts lie between rows, so that a row has one owner, unless a row is so large that shards would
    differ by it. Variables whose number is in ``whole`` must not be cut. They are dealt out first,
    the largest to the server that has least; the others level the shards.

    Raises:
        ConfigurationError: There are more servers than can be given something.
        ModelError: There is nothing to share out.
    """
    kept = sorted(
        (i for i in set(whole) if specs[i].size), key=lambda i: (-specs[i].nbytes, i)
    )  # fmt: skip
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
    """Returns all variables from the buffers of all shards; no copy where one has the whole."""
    found: dict[int, np.ndarray] = {}
    for shard, buffer in zip(shards, buffers):
        for piece, view in zip(shard.pieces, shard.views(buffer)):
            spec = specs[piece.variable]
            if view.size == spec.size:
                found[piece.variable] = view
                continue
            if piece.variable not in found:
                found[piece.variable] = np.empty(spec.shape, view.dtype)
            flat = found[piece.variable].reshape(-1)
            flat[piece.start : piece.stop] = view.reshape(-1)
    # Variables without elements are in no shard.
    return [
        found[number] if number in found else np.empty(spec.shape, numpy_dtype(spec.dtype))
        for number, spec in enumerate(specs)
    ]


class _Sequence:
    """Variables one after another; positions are elements counted from the first one's first."""

    def __init__(self, specs: Sequence[Spec], members: Sequence[int], shard_bytes: float) -> None:
        self._specs = specs
        self._members = members
        self._shard_bytes = shard_bytes  # of a shard on average
        self._items = [0, *itertools.accumulate(specs[i].size for i in members)]
        self._bytes = [0, *itertools.accumulate(specs[i].nbytes for i in members)]
        self.items, self.nbytes = self._items[-1], self._bytes[-1]

    def nearest(self, byte: float) -> int:
        """Returns the position next to ``byte`` where it is good to cut."""
        at = bisect.bisect_right(self._bytes, byte) - 1
        if at >= len(self._members):
            return self.items
        spec = self._specs[self._members[at]]
        row_bytes = spec.row * spec.itemsize
        unit = spec.row if row_bytes <= _LARGEST_ROW * self._shard_bytes else 1
        units = round((byte - self._bytes[at]) / (unit * spec.itemsize))
        return self._items[at] + min(units * unit, spec.size)

    def between(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yields variable, start and stop for each part of ``[first, last)``."""
        at = bisect.bisect_right(self._items, first) - 1
        while first < last:
            stop = min(last, self._items[at + 1])
            yield self._members[at], first - self._items[at], stop - self._items[at]
            first = stop
            at += 1


def _ranges(sequence: _Sequence, loads: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields a range of positions for each server, which has ``loads`` bytes already."""
    # Who has nothing else gets one element at least.
    needs = [0 if load else 1 for load in loads]
    start, byte = 0, 0.0
    for server, share in enumerate(_shares(sequence.nbytes, loads)):
        byte += share
        most = sequence.items - sum(needs[server + 1 :])
        stop = min(max(sequence.nearest(byte), start + needs[server]), most)
        if server == len(loads) - 1:
            stop = sequence.items
        yield start, stop
        start = stop


def _shares(rest: int, loads: Sequence[int]) -> list[float]:
    """Returns how to pour ``rest`` bytes over servers so that the fullest is as low as can be."""
    # With too few of the least loaded ones the level is too high; with too many as well.
    below = enumerate(itertools.accumulate(sorted(loads)), 1)
    level = min((rest + nbytes) / count for count, nbytes in below)
    return [max(0.0, level - load) for load in loads]


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
            "The model has no trainable variables with elements. Expected some for the parameter "
            "servers to hold: build the model, and leave some of its layers trainable."
        )
    if not 1 <= servers <= elements + kept:
        raise ConfigurationError(
            f"{servers} parameter servers can't hold something each: expected at least 1 and at "
            f"most {elements + kept}, for the model has {elements} elements that can be shared "
            f"out and {kept} variables that must stay whole. Ask for another number of servers."
        )


def numpy_dtype(name: str) -> np.dtype:
    """Returns the type of a name, such as ``bfloat16``, which NumPy itself needn't know."""
    return np.dtype(getattr(ml_dtypes, name, name))
