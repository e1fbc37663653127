"""Gradients on their way to a server: packed for its shard, and added up.

Dense ones lie as they do in the shard, sparse ones are rows. A header of one number for each of the
shard's pieces goes first; neighbours that are dense travel together, from one flat buffer to
another, or stay in one that both sides see.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "map_values",
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
        kinds: Which gradient each piece has, int64: the header's numbers.
        flat: The gradients of dense pieces, in a buffer of the shard.
        rows: The gradients of sparse pieces, by the piece's number.
        slot: Which slot the other side finds ``flat`` in; SENT where it must be sent.
    """

    shard: Shard
    kinds: np.ndarray
    flat: np.ndarray
    rows: Mapping[int, Rows] = field(default_factory=dict)
    slot: int = SENT

    @staticmethod
    def header_buffer(shard: Shard) -> np.ndarray:
        """Room for a ``header``."""
        return np.empty(1 + len(shard.pieces), np.int64)

    @classmethod
    def expect(
        cls, shard: Shard, header: np.ndarray, flat: np.ndarray, slots: Sequence[np.ndarray] = ()
    ) -> ShardGradients:
        """Room for the gradients that a header announces.

        Args:
            shard: Where the pieces lie.
            header: What the worker sent first.
            flat: Where dense gradients go that are sent.
            slots: Where they lie if they aren't.

        Raises:
            MismatchError: No worker with this model can have sent this header.
        """
        slot, kinds = int(header[0]), header[1:]
        sparse = {n: int(kind) for n, kind in enumerate(kinds) if kind >= 0}
        if (kinds < _DENSE).any() or any(len(shard.pieces[n].shape) < 1 for n in sparse):
            raise MismatchError(
                f"Gradients of kinds {kinds.tolist()} came for {len(shard.pieces)} pieces of "
                "variables. All ranks must train the same model."
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
        flat = flat if slot == SENT else slots[slot]
        return cls(shard=shard, kinds=kinds, flat=flat, rows=rows, slot=slot)

    @property
    def header(self) -> np.ndarray:
        """What is sent first: the slot, and ``kinds``."""
        return np.array([self.slot, *self.kinds], np.int64)

    @property
    def missing(self) -> list[int]:
        """Numbers of the pieces without a gradient."""
        return np.flatnonzero(self.kinds == _NONE).tolist()

    def blocks(self) -> Iterator[np.ndarray]:
        """All memory that travels after the header, in its order."""
        pieces = self.shard.pieces
        for dense, run in itertools.groupby(range(len(pieces)), lambda n: self.kinds[n] == _DENSE):
            numbers = list(run)
            if dense and self.slot == SENT:
                first, last = pieces[numbers[0]], pieces[numbers[-1]]
                yield self.flat[first.offset : last.offset + last.nbytes]
        for rows in self.rows.values():
            if len(rows.indices):
                yield from rows

    def by_piece(self) -> list[Gradient]:
        """The gradient of each piece; dense ones are views of ``flat``."""
        return [
            view if kind == _DENSE else self.rows.get(number)
            for number, (kind, view) in enumerate(zip(self.kinds, self.shard.views(self.flat)))
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
        """Numbers of the pieces whose gradient has NaN or infinity."""
        return [n for n, gradient in enumerate(self.by_piece()) if not _all_finite(gradient)]


def pack_gradients(
    shard: Shard,
    specs: Sequence[Spec],
    gradients: Sequence[Gradient],
    flat: np.ndarray,
    slot: int = SENT,
) -> ShardGradients:
    """Cut gradients for one shard.

    Args:
        shard: Which parts of the variables are wanted.
        specs: What all variables are like.
        gradients: One for each whole variable.
        flat: Where dense ones go, a buffer of the shard.
        slot: Which slot that is, if the server sees it.
    """
    kinds = np.full(len(shard.pieces), _DENSE, np.int64)
    rows = {}
    for number, (piece, view) in enumerate(zip(shard.pieces, shard.views(flat))):
        gradient, spec = gradients[piece.variable], specs[piece.variable]
        if gradient is None:
            kinds[number] = _NONE
        elif isinstance(gradient, Rows) and _has_whole_rows(piece, spec):
            rows[number] = Rows(*take_rows(piece, spec, *gradient))
            kinds[number] = len(rows[number].indices)
        else:
            whole = _whole(gradient, spec) if isinstance(gradient, Rows) else gradient
            view.reshape(-1)[...] = whole.reshape(-1)[piece.start : piece.stop]
    return ShardGradients(shard=shard, kinds=kinds, flat=flat, rows=rows, slot=slot)


class GradientSum:
    """Adds up gradients, of each variable in as much memory as one gradient takes.

    float16 and bfloat16 are summed in float32.
    """

    def __init__(self) -> None:
        self._totals: list[Gradient] = []
        self._dtypes: list[np.dtype | None] = []
        self.steps = 0
        """How often ``add`` was called since the sums were taken."""

    def add(self, gradients: Sequence[Gradient] | None) -> None:
        """Add a step's gradients of all variables; they are copied. None where it has none."""
        self.steps += 1
        if gradients is None:
            return
        self._totals = self._totals or [None] * len(gradients)
        self._dtypes = self._dtypes or [None] * len(gradients)
        for number, gradient in enumerate(gradients):
            total = self._totals[number]
            if isinstance(gradient, Rows):
                self._dtypes[number] = gradient.values.dtype
                several = [total] if isinstance(total, Rows) else []
                several.append(Rows(gradient.indices, widen(gradient.values)))
                self._totals[number] = merge_rows(several)
            elif gradient is not None:
                self._dtypes[number] = gradient.dtype
                if total is None or isinstance(total, Rows):
                    total = gradient.astype(accumulator_dtype(gradient.dtype))
                else:
                    total += gradient
                self._totals[number] = total

    def take_wide(self) -> list[Gradient]:
        """The sums in the type that they were made in, and begin anew.

        None for variables without a gradient in any step; empty where no step had gradients.
        """
        totals, self._totals, self._dtypes, self.steps = self._totals, [], [], 0
        return totals

    def take(self) -> list[Gradient] | None:
        """The sums in the gradients' own type, and begin anew; None where there are none."""
        dtypes = self._dtypes
        sums = [
            map_values(lambda values, to=dtype: values.astype(to, copy=False), total)
            for total, dtype in zip(self.take_wide(), dtypes)
        ]
        return sums or None


def map_values(function: Callable[..., np.ndarray], gradient: Gradient) -> Gradient:
    """A gradient whose values are those of another after ``function``; None stays None."""
    if isinstance(gradient, Rows):
        return Rows(gradient.indices, function(gradient.values))
    return None if gradient is None else function(gradient)


def take_rows(
    piece: VariableSlice, spec: Spec, indices: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a sparse gradient that belong to ``piece``, counted from its first row.

    Args:
        piece: Consists of whole rows.
        spec: What the whole variable is like.
        indices: Rows of the variable, shape ``(n,)``.
        values: The gradients of these rows, shape ``(n, *spec.shape[1:])``.

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
    """The sum of sparse gradients; each row once, in order."""
    indices = np.concatenate([rows.indices for rows in several])
    unique, places = np.unique(indices, return_inverse=True)
    values = np.concatenate([rows.values for rows in several])
    merged = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(merged, places, values)
    return Rows(unique, merged)


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
    """A sparse gradient with all its zeros."""
    whole = np.zeros(spec.shape, rows.values.dtype)
    np.add.at(whole, rows.indices, rows.values)
    return whole
