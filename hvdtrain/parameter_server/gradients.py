"""Gradients on their way to a server: packed for its shard, and added up.

Dense ones lie as they do in the shard, sparse ones are rows. A header of one number for each of the
shard's pieces goes first; neighbours that are dense travel together, from one flat buffer to
another, or stay in one that both sides see.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hvdtrain.collectives.kernels import accumulator_dtype, widen
from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.sharding import Shard, Spec, VariableSlice, numpy_dtype

__all__ = [
    "SENT",
    "Gradient",
    "GradientSum",
    "Rows",
    "ShardGradients",
    "merge_rows",
    "pack_gradients",
    "take_rows",
]

# What the header says of a piece: how many rows it has, or one of these.
_NONE, _DENSE = -1, -2
# Where dense gradients are: in a slot by its number, or on their way.
SENT = -1
# So many values are looked at together.
CHECKED_ITEMS = 128 << 10


class Rows(NamedTuple):
    """The rows that a sparse gradient has values for.

    ``indices`` int64 of shape (n,), perhaps with repetitions; ``values`` of shape (n, ...).
    """

    indices: np.ndarray
    values: np.ndarray


Gradient = np.ndarray | Rows | None


@dataclass(frozen=True, kw_only=True)
class ShardGradients:
    """Gradients of a shard's pieces, or room for them.

    Attributes:
        shard: Where the pieces lie.
        flat: The gradients of dense pieces, in a buffer of the shard.
        rows: The gradients of sparse pieces, by the piece's number.
        missing: Numbers of the pieces without a gradient.
        slot: Which slot the other side finds ``flat`` in; SENT where it must be sent.
    """

    shard: Shard
    flat: np.ndarray
    rows: Mapping[int, Rows] = field(default_factory=dict)
    missing: Set[int] = frozenset()
    slot: int = SENT

    @staticmethod
    def header_buffer(shard: Shard) -> np.ndarray:
        """Returns room for a ``header``."""
        return np.empty(1 + len(shard.pieces), np.int64)

    @classmethod
    def expect(
        cls, shard: Shard, header: np.ndarray, flat: np.ndarray, slots: Sequence[np.ndarray] = ()
    ) -> ShardGradients:
        """Returns room for the gradients that a header announces.

        Those of dense pieces come to ``flat``, or lie in one of the ``slots``.

        Raises:
            MismatchError: No worker with this model can have sent this header.
        """
        slot, *kinds = header.tolist()
        sparse = {n: kind for n, kind in enumerate(kinds) if kind >= 0}
        if min(kinds) < _DENSE or any(len(shard.pieces[n].shape) < 1 for n in sparse):
            raise MismatchError(
                f"Gradients of kinds {kinds} came for {len(shard.pieces)} pieces of variables. All "
                "ranks must train the same model."
            )
        if not SENT <= slot < len(slots):
            raise MismatchError(
                f"Gradients were said to lie in slot {slot} of {len(slots)} that this server sees; "
                "all ranks need the same version of hvdtrain."
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
        """The numbers that are sent first: the slot, and which gradient each piece has."""
        sparse = {number: len(rows.indices) for number, rows in self.rows.items()}
        kinds = {**sparse, **dict.fromkeys(self.missing, _NONE)}
        return np.array(
            [self.slot, *(kinds.get(n, _DENSE) for n in range(len(self.shard.pieces)))], np.int64
        )

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all memory that travels after the header, in its order."""
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
        """Returns the gradient of each piece; dense ones are views of ``flat``."""
        return [
            None if number in self.missing else self.rows.get(number, view)
            for number, view in enumerate(self.shard.views(self.flat))
        ]

    def check(self) -> None:
        """Raise MismatchError unless sparse gradients are of rows that there are."""
        for number, rows in self.rows.items():
            limit = self.shard.pieces[number].shape[0]
            if len(rows.indices) and not 0 <= rows.indices.min() <= rows.indices.max() < limit:
                raise MismatchError(
                    f"A sparse gradient has rows {rows.indices.min()} to {rows.indices.max()} of "
                    f"a piece with {limit}."
                )

    def non_finite(self) -> list[int]:
        """Returns the numbers of the pieces whose gradient has NaN or infinity."""
        return [n for n, gradient in enumerate(self.by_piece()) if not _all_finite(gradient)]


def pack_gradients(
    shard: Shard,
    specs: Sequence[Spec],
    gradients: Sequence[Gradient],
    flat: np.ndarray,
    slot: int = SENT,
) -> ShardGradients:
    """Returns the gradients of a shard's pieces, cut from those of whole variables.

    Dense ones go to ``flat``, a buffer of the shard, which is that slot if the server sees it.
    """
    rows, missing = {}, set()
    for number, (piece, view) in enumerate(zip(shard.pieces, shard.views(flat))):
        gradient, spec = gradients[piece.variable], specs[piece.variable]
        if gradient is None:
            missing.add(number)
        elif isinstance(gradient, Rows) and _has_whole_rows(piece, spec):
            indices, values = take_rows(piece, spec, *gradient)
            rows[number] = Rows(indices, values.astype(numpy_dtype(piece.dtype), copy=False))
        else:
            whole = _whole(gradient, spec) if isinstance(gradient, Rows) else gradient
            view.reshape(-1)[...] = whole.reshape(-1)[piece.start : piece.stop]
    return ShardGradients(shard=shard, flat=flat, rows=rows, missing=missing, slot=slot)


class GradientSum:
    """Adds up gradients, of each variable in as much memory as one gradient takes.

    float16 and bfloat16 are summed in float32.
    """

    def __init__(self) -> None:
        self._totals: list[Gradient] = []

    def add(self, gradients: Sequence[Gradient], weight: float) -> None:
        """Add the weighted gradients of all variables; dense ones may be overwritten."""
        self._totals = self._totals or [None] * len(gradients)
        for number, gradient in enumerate(gradients):
            total = self._totals[number]
            if isinstance(gradient, Rows):
                rows = Rows(gradient.indices, _weighted(gradient.values, weight))
                if isinstance(total, np.ndarray):
                    np.add.at(total, rows.indices, rows.values)
                else:
                    self._totals[number] = merge_rows([rows] if total is None else [total, rows])
            elif gradient is not None:
                values = _weighted(gradient, weight)
                if isinstance(total, np.ndarray):
                    total += values
                    continue
                self._totals[number] = sums = values.astype(accumulator_dtype(gradient.dtype))
                if total is not None:
                    np.add.at(sums, total.indices, total.values)

    def take(self) -> list[Gradient]:
        """Return the sums in their accumulation type, and start from zero.

        A sum is None if no worker had a gradient of that variable.
        """
        totals, self._totals = self._totals, []
        return totals


def take_rows(
    piece: VariableSlice, spec: Spec, indices: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a sparse gradient within ``piece``, counted from its first row.

    ``piece`` consists of whole rows; ``indices`` are rows of the variable, of shape ``(n,)``, and
    ``values`` their gradients, of shape ``(n, *spec.shape[1:])``.

    Raises:
        ValueError: ``piece`` has parts of rows.
    """
    if not _has_whole_rows(piece, spec):
        raise ValueError(
            f"Elements {piece.start} to {piece.stop} of {spec.path}, of shape {spec.shape}, are "
            "not whole rows. Send the gradient of this variable as a whole."
        )
    first, last = piece.start // spec.row, piece.stop // spec.row
    mine = (indices >= first) & (indices < last)
    return indices[mine] - first, values[mine]


def merge_rows(several: Sequence[Rows]) -> Rows:
    """Returns the sum of sparse gradients, with each row once, in order."""
    indices = np.concatenate([rows.indices for rows in several])
    unique, places = np.unique(indices, return_inverse=True)
    values = np.concatenate([rows.values for rows in several])
    merged = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(merged, places, values)
    return Rows(unique, merged)


def _weighted(values: np.ndarray, weight: float) -> np.ndarray:
    wide = widen(values)
    return np.multiply(wide, weight, out=wide)


def _all_finite(gradient: Gradient) -> bool:
    """Look block by block, so that what was found of the values stays in the cache."""
    if gradient is None:
        return True
    flat = (gradient.values if isinstance(gradient, Rows) else gradient).reshape(-1)
    return all(
        np.isfinite(flat[start : start + CHECKED_ITEMS]).all()
        for start in range(0, flat.size, CHECKED_ITEMS)
    )


def _has_whole_rows(piece: VariableSlice, spec: Spec) -> bool:
    return bool(spec.shape) and piece.start % spec.row == 0 == piece.stop % spec.row


def _whole(rows: Rows, spec: Spec) -> np.ndarray:
    """Returns a sparse gradient with all its zeros."""
    whole = np.zeros(spec.shape, rows.values.dtype)
    np.add.at(whole, rows.indices, rows.values)
    return whole
