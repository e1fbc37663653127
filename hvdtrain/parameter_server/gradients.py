"""Gradients of a server's shard of the variables.

Workers pack these gradients. Servers receive and average them. Dense gradients have the layout of
the shard's buffer. Sparse gradients consist of rows. A message starts with a header, which has one
number for each piece of a variable in the shard. Dense gradients that are next to each other in the
buffer are sent in one block. If worker and server share memory, dense gradients stay there and are
not sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.kernels import accumulator_dtype, widen
from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.sharding import Shard, Spec, VariableSlice, numpy_dtype

__all__ = [
    "SENT",
    "Gradient",
    "GradientMean",
    "Rows",
    "ShardGradients",
    "pack_gradients",
    "take_rows",
]

# Values in the header for a piece: its number of rows, or one of these.
_NONE, _DENSE = -1, -2
# The slot in the header if dense gradients are sent in messages and not in shared memory.
SENT = -1
# Number of values that are checked at a time, so that the intermediate result stays in the cache.
CHECKED_ITEMS = 128 << 10


class Rows(NamedTuple):
    """A sparse gradient.

    ``indices`` holds the row indices, int64 of shape (n,). An index may occur several times.
    ``values`` holds the gradient of each of these rows, and its shape is (n, ...).
    """

    indices: np.ndarray
    values: np.ndarray


Gradient = np.ndarray | Rows | None


@dataclass(frozen=True, kw_only=True)
class ShardGradients:
    """The gradients of a shard. A shard consists of pieces, which are parts of variables."""

    shard: Shard  # the shard, which determines the layout
    flat: np.ndarray  # a buffer with the shard's layout that contains the dense gradients
    # The sparse gradients. A key is the index of a piece.
    rows: Mapping[int, Rows] = field(default_factory=dict)
    missing: Set[int] = frozenset()  # the indices of the pieces without a gradient
    # The slot of shared memory that contains ``flat``. ``SENT`` if ``flat`` is sent in a message.
    slot: int = SENT

    @classmethod
    def from_header(
        cls, shard: Shard, header: np.ndarray, flat: np.ndarray, slots: Sequence[np.ndarray] = ()
    ) -> ShardGradients:
        """Create gradients that are still empty, and whose ``blocks`` can receive a message.

        Dense gradients are received in ``flat``. If they are in shared memory, they are already in
        one of the ``slots``.

        Raises:
            MismatchError: If the header does not fit the shard.
        """
        slot, *kinds = header.tolist()
        sparse = {n: kind for n, kind in enumerate(kinds) if kind >= 0}
        if min(kinds) < _DENSE or any(len(shard.pieces[n].shape) < 1 for n in sparse):
            raise MismatchError(
                f"Received gradients of kinds {kinds} for {len(shard.pieces)} pieces of variables. "
                "All ranks must train the same model."
            )
        rows = {}
        for number, count in sparse.items():
            piece = shard.pieces[number]
            values = np.empty((count, *piece.shape[1:]), numpy_dtype(piece.dtype))
            rows[number] = Rows(np.empty(count, np.int64), values)
        missing = {n for n, kind in enumerate(kinds) if kind == _NONE}
        flat = flat if slot == SENT else slots[slot]
        return cls(shard=shard, flat=flat, rows=rows, missing=missing, slot=slot)

    @property
    def header(self) -> np.ndarray:
        """The slot, followed by the kind of each piece's gradient. int64 of shape (1 + pieces,)."""
        sparse = {number: len(rows.indices) for number, rows in self.rows.items()}
        kinds = {**sparse, **dict.fromkeys(self.missing, _NONE)}
        return np.array(
            [self.slot, *(kinds.get(n, _DENSE) for n in range(len(self.shard.pieces)))], np.int64
        )

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the arrays that are sent after the header, in order."""
        pieces = self.shard.pieces
        not_dense = self.missing | self.rows.keys()
        for skipped, run in itertools.groupby(range(len(pieces)), not_dense.__contains__):
            numbers = list(run)
            if not skipped and self.slot == SENT:
                first, last = pieces[numbers[0]], pieces[numbers[-1]]
                yield self.flat[first.offset : last.offset + last.nbytes]
        for rows in self.rows.values():
            if len(rows.indices):
                yield from rows

    def by_piece(self) -> list[Gradient]:
        """Return the gradient of each piece. Dense gradients are views of ``flat``."""
        return [
            None if number in self.missing else self.rows.get(number, view)
            for number, view in enumerate(self.shard.views(self.flat))
        ]

    def check(self) -> None:
        """Raise ``MismatchError`` if a row index of a sparse gradient is out of range."""
        for number, rows in self.rows.items():
            limit = self.shard.pieces[number].shape[0]
            if len(rows.indices) and not 0 <= rows.indices.min() <= rows.indices.max() < limit:
                raise MismatchError(
                    f"A sparse gradient has rows {rows.indices.min()} to {rows.indices.max()} of "
                    f"a piece with {limit} rows."
                )

    def non_finite(self) -> list[int]:
        """Return the indices of the pieces whose gradients contain NaN or infinity."""
        return [n for n, gradient in enumerate(self.by_piece()) if not _all_finite(gradient)]


def pack_gradients(
    shard: Shard,
    specs: Sequence[Spec],
    gradients: Sequence[Gradient],
    flat: np.ndarray,
    slot: int = SENT,
) -> ShardGradients:
    """Return the part of a model's gradients that belongs to a shard.

    Dense gradients are copied to ``flat``, a buffer with the shard's layout. ``slot`` is the slot
    of shared memory that contains ``flat``, or ``SENT``.
    """
    rows, missing = {}, set()
    for number, (piece, view) in enumerate(zip(shard.pieces, shard.views(flat))):
        gradient, spec = gradients[piece.variable], specs[piece.variable]
        if gradient is None:
            missing.add(number)
        elif isinstance(gradient, Rows) and len(piece.shape) == len(spec.shape) > 0:
            # The piece has whole rows.
            indices, values = take_rows(piece, spec, *gradient)
            rows[number] = Rows(indices, values.astype(numpy_dtype(piece.dtype), copy=False))
        else:
            whole = _densify(gradient, spec) if isinstance(gradient, Rows) else gradient
            view.reshape(-1)[...] = whole.reshape(-1)[piece.start : piece.stop]
    return ShardGradients(shard=shard, flat=flat, rows=rows, missing=missing, slot=slot)


class GradientMean:
    """The weighted mean of the gradients of several workers.

    Its memory does not grow with the number of workers. float16 and bfloat16 are summed in float32.
    """

    def __init__(self) -> None:
        self._first: ShardGradients | None = None  # has room for the mean
        self._sums: list[Gradient] = []
        self._weight = 0.0

    def add(self, gradients: ShardGradients, weight: float) -> None:
        """Add the gradients of one worker. Their arrays may be overwritten.

        Raises:
            MismatchError: If earlier gradients are for different variables.
        """
        first = self._first = self._first or gradients
        if first.missing != gradients.missing or first.rows.keys() != gradients.rows.keys():
            raise MismatchError(
                "Workers have gradients for different variables, or some workers have a sparse "
                "gradient where others have a dense one. All ranks must train the same variables "
                "with the same loss."
            )
        every = gradients.by_piece()
        self._sums = self._sums or [None] * len(every)
        for number, gradient in enumerate(every):
            if gradient is not None:
                self._sums[number] = _add(self._sums[number], gradient, weight)
        self._weight += weight

    def take(self) -> ShardGradients | None:
        """Return the weighted mean, or None if no gradients were added. Then start a new mean.

        The result is in the buffer of the gradients that were added first.
        """
        first, self._first = self._first, None
        sums, self._sums = self._sums, []
        weight, self._weight = self._weight, 0.0
        if first is None:
            return None
        rows = {}
        for number, (total, room) in enumerate(zip(sums, first.by_piece())):
            if isinstance(total, Rows) and isinstance(room, Rows):
                values = np.divide(total.values, weight)
                rows[number] = Rows(total.indices, values.astype(room.values.dtype, copy=False))
            elif isinstance(total, np.ndarray) and isinstance(room, np.ndarray):
                np.divide(total, weight, out=room, casting="unsafe")
        return replace(first, rows=rows)


def take_rows(
    piece: VariableSlice, spec: Spec, indices: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a sparse gradient that belong to ``piece``.

    The row indices in the result are counted from the first row of ``piece``, which must consist of
    whole rows. ``indices`` are row indices in the variable, of shape ``(n,)``, and ``values`` are
    the gradients of these rows, of shape ``(n, *spec.shape[1:])``.
    """
    first, last = piece.start // spec.row, piece.stop // spec.row
    inside = (indices >= first) & (indices < last)
    return indices[inside] - first, values[inside]


def _add(total: Gradient, gradient: np.ndarray | Rows, weight: float) -> Gradient:
    """Return ``total + weight * gradient`` with unique sorted rows. May overwrite both."""
    if isinstance(gradient, Rows):
        indices, values = gradient.indices, _weighted(gradient.values, weight)
        if isinstance(total, Rows):
            indices = np.concatenate([total.indices, indices])
            values = np.concatenate([total.values, values])
        unique, places = np.unique(indices, return_inverse=True)
        merged = np.zeros((len(unique), *values.shape[1:]), values.dtype)
        np.add.at(merged, places, values)
        return Rows(unique, merged)
    values = _weighted(gradient, weight)
    if isinstance(total, np.ndarray):
        total += values
        return total
    return values.astype(accumulator_dtype(gradient.dtype))


def _weighted(values: np.ndarray, weight: float) -> np.ndarray:
    wide = widen(values)
    return np.multiply(wide, weight, out=wide)


def _all_finite(gradient: Gradient) -> bool:
    if gradient is None:
        return True
    flat = (gradient.values if isinstance(gradient, Rows) else gradient).reshape(-1)
    return all(
        np.isfinite(flat[start : start + CHECKED_ITEMS]).all()
        for start in range(0, flat.size, CHECKED_ITEMS)
    )


def _densify(rows: Rows, spec: Spec) -> np.ndarray:
    whole = np.zeros(spec.shape, rows.values.dtype)
    np.add.at(whole, rows.indices, rows.values)
    return whole
