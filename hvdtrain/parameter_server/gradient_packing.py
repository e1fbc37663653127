"""Gradients on their way to a server: dense ones as they lie in its shard, sparse ones as rows.

What a shard's pieces have is told first, one number for each; the rest needs no words: neighbours
that are dense travel together, from one flat buffer to another, or stay in one that both sides see.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.sharding import Shard, Spec, VariableSlice, numpy_dtype, take_rows

__all__ = ["SENT", "Gradient", "Parts", "Rows", "merge_rows", "pack_gradients"]

# What a piece has: so many rows, or one of these.
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
class Parts:
    """Gradients of a shard's pieces, or room for them.

    Attributes:
        shard: The shard.
        kinds: What each piece has, int64.
        flat: Those of dense pieces, in a buffer of the shard.
        rows: Those of sparse pieces, by the piece's number.
        slot: Which slot the other side finds ``flat`` in; SENT where it must be sent.
    """

    shard: Shard
    kinds: np.ndarray
    flat: np.ndarray
    rows: Mapping[int, Rows] = field(default_factory=dict)
    slot: int = SENT

    @staticmethod
    def room_for_words(shard: Shard) -> np.ndarray:
        """Where ``words`` fit."""
        return np.empty(1 + len(shard.pieces), np.int64)

    @classmethod
    def expect(
        cls, shard: Shard, words: np.ndarray, flat: np.ndarray, slots: Sequence[np.ndarray] = ()
    ) -> Parts:
        """Room for what was told with ``words``.

        Args:
            shard: The shard.
            words: What was told.
            flat: Where dense gradients go that are sent.
            slots: Where they lie if they aren't.

        Raises:
            MismatchError: No worker with this model can have told that.
        """
        slot, kinds = int(words[0]), words[1:]
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
    def words(self) -> np.ndarray:
        """What is told first."""
        return np.array([self.slot, *self.kinds], np.int64)

    @property
    def missing(self) -> list[int]:
        """Numbers of the pieces without a gradient."""
        return np.flatnonzero(self.kinds == _NONE).tolist()

    def blocks(self) -> Iterator[np.ndarray]:
        """All memory that travels, in its order."""
        pieces = self.shard.pieces
        for dense, run in itertools.groupby(range(len(pieces)), lambda n: self.kinds[n] == _DENSE):
            numbers = list(run)
            if dense and self.slot == SENT:
                first, last = pieces[numbers[0]], pieces[numbers[-1]]
                yield self.flat[first.offset : last.offset + last.nbytes]
        for rows in self.rows.values():
            if len(rows.indices):
                yield from rows

    def dense(self) -> Iterator[np.ndarray]:
        """The gradients of dense pieces."""
        for kind, view in zip(self.kinds, self.shard.views(self.flat)):
            if kind == _DENSE:
                yield view

    def check(self) -> None:
        """See that sparse gradients are of rows that there are.

        Raises:
            MismatchError: They aren't.
        """
        for number, rows in self.rows.items():
            limit = self.shard.pieces[number].shape[0]
            if len(rows.indices) and not 0 <= rows.indices.min() <= rows.indices.max() < limit:
                raise MismatchError(
                    f"A sparse gradient has rows {rows.indices.min()} to {rows.indices.max()} of "
                    f"a piece with {limit}."
                )

    def non_finite(self) -> list[int]:
        """Numbers of the pieces whose gradient has NaN or infinity."""
        values = {number: rows.values for number, rows in self.rows.items()}
        for number, view in enumerate(self.shard.views(self.flat)):
            if self.kinds[number] == _DENSE:
                values[number] = view
        return sorted(number for number, array in values.items() if not _all_finite(array))


def pack_gradients(
    shard: Shard,
    specs: Sequence[Spec],
    gradients: Sequence[Gradient],
    flat: np.ndarray,
    slot: int = SENT,
) -> Parts:
    """A shard's part of gradients.

    Args:
        shard: Of the variables.
        specs: Of all variables.
        gradients: Of each whole variable, by its number.
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
    return Parts(shard=shard, kinds=kinds, flat=flat, rows=rows, slot=slot)


def merge_rows(several: Sequence[Rows]) -> Rows:
    """The sum of sparse gradients; each row once, in order."""
    indices = np.concatenate([rows.indices for rows in several])
    unique, places = np.unique(indices, return_inverse=True)
    values = np.concatenate([rows.values for rows in several])
    merged = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(merged, places, values)
    return Rows(unique, merged)


def _all_finite(array: np.ndarray) -> bool:
    """Block by block, so that what was found of the values stays in the cache."""
    flat = array.reshape(-1)
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
