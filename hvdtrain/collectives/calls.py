"""Descriptions of calls, which ranks compare before each operation, and checks of arguments."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.errors import ConfigurationError

__all__ = [
    "JOIN",
    "RAISED",
    "Call",
    "Codec",
    "RanksRaised",
    "SomeJoined",
    "as_bytes",
    "check_ranks",
    "check_root",
    "check_splits",
    "decode",
    "encode",
    "make_call",
    "plain",
    "row_bytes",
    "type_name",
    "with_rows",
]

Codec = Literal["json", "pickle"]

JOIN = "join"
# A rank that leaves a section with an error makes a call of this kind.
RAISED = "raised"


class RanksRaised(Exception):
    """Raised on all ranks if some ranks left an ``Engine.section`` block with an error.

    Args:
        reasons: Maps each of these ranks to the text of its error. The keys are the job's ranks,
            even if the engine connects a subset of the job.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.text = "; ".join(f"rank {rank} failed: {text}" for rank, text in reasons.items())
        super().__init__(self.text)


class SomeJoined(Exception):
    """Raised on all ranks if some ranks have called ``Engine.join``.

    The calls of the ranks that have not joined are equal.

    Args:
        ranks: The ranks that called ``join``.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} have joined")
        self.ranks = frozenset(ranks)


class Call:
    """An operation, and arguments that must be equal on all ranks. ``note`` is only for errors."""

    __slots__ = ("detail", "digest", "kind", "name", "note", "short_text", "text", "title")

    def __init__(self, kind: str, name: str, detail: tuple[Any, ...], note: str) -> None:
        self.kind, self.name, self.detail, self.note = kind, name, detail, note
        self.text = self.title = f"{kind}({name})" if name else kind
        if detail:
            self.text += f" with {', '.join(str(part) for part in detail)}"
        word = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        self.digest = int.from_bytes(word, "little") >> 1  # fits a signed 64-bit word
        if note:
            self.text += f" ({note})"
        self.short_text = self.text if len(self.text) <= 200 else self.text[:200] + " …"


@functools.lru_cache(maxsize=4096)
def make_call(kind: str, name: str, detail: tuple[Any, ...] = (), note: str = "") -> Call:
    """Return the description of a call, cached because a training loop repeats its calls."""
    return Call(kind, name, detail, note)


def check_root(root: int, size: int) -> None:
    """Raise ``ConfigurationError`` if ``root`` is not a rank."""
    if not 0 <= root < size:
        raise ConfigurationError(f"root must be between 0 and {size - 1}, got {root}.")


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the ranks in ascending order, after checking that they are valid and distinct."""
    ordered = tuple(sorted(ranks))
    if not ordered or len(set(ordered)) < len(ordered) or ordered[0] < 0 or ordered[-1] >= size:
        raise ConfigurationError(
            f"ranks must be one or more distinct ranks between 0 and {size - 1}, got {list(ranks)}."
        )
    return ordered


def check_splits(rows: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return the number of rows for each of ``size`` ranks; the same if ``splits`` is None."""
    if splits is None:
        if rows % size:
            raise ConfigurationError(
                f"alltoall without splits needs a multiple of {size} rows, one share for each "
                f"rank, got {rows}; pass splits."
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigurationError(
            f"splits must be {size} non-negative numbers with a sum of {rows} rows, got {counts}."
        )
    return counts


def with_rows(array: np.ndarray, operation: str) -> np.ndarray:
    """Check that an array has rows that can be sent, and return it in contiguous memory."""
    if array.ndim == 0:
        raise ConfigurationError(
            f"{operation} needs an array with a first axis, got a scalar; pass an array of one "
            "element."
        )
    return plain(array, operation)


def plain(array: np.ndarray, operation: str) -> np.ndarray:
    """Check that the bytes of an array can be sent, and return it in contiguous memory."""
    if array.dtype.hasobject:
        raise ConfigurationError(
            f"{operation} can't send an array of Python objects, got dtype {array.dtype}; pass "
            "numbers, or use broadcast_object or allgather_object."
        )
    return np.asarray(array, order="C")


def type_name(dtype: np.dtype) -> str:
    """Return the name of a dtype, including the byte order if it is not native."""
    return dtype.name if dtype.isnative else dtype.str


def row_bytes(array: np.ndarray) -> int:
    """Return the size of one row of the first axis, in bytes."""
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return a flat uint8 view of an array."""
    return array.reshape(-1).view(np.uint8)


def encode(obj: Any, codec: Codec) -> np.ndarray:
    """Serialize an object as a flat uint8 array.

    Raises:
        ConfigurationError: If JSON can't represent the object, or the codec is unknown.
    """
    if codec == "pickle":
        return np.frombuffer(pickle.dumps(obj), np.uint8)
    if codec != "json":
        raise ConfigurationError(f"codec must be 'json' or 'pickle', got {codec!r}.")
    try:
        text = json.dumps(obj)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"An object of type {type(obj).__name__} can't be sent as JSON ({error}). Send plain "
            "dicts, lists, strings and numbers, or pass codec='pickle' if all ranks are trusted."
        ) from None
    return np.frombuffer(text.encode(), np.uint8)


def decode(data: np.ndarray, codec: Codec) -> Any:
    """Deserialize the result of ``encode``. JSON turns tuples into lists."""
    if codec == "pickle":
        return pickle.loads(data.tobytes())
    return json.loads(data.tobytes().decode())
