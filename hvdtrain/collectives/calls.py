"""One call of an operation: what the ranks must agree on, and its arguments: checks, and bytes.

Objects cross as JSON, and by pickle only if the caller asks for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.errors import ConfigurationError

__all__ = [
    "Call",
    "Calls",
    "Codec",
    "as_bytes",
    "check_ranks",
    "check_root",
    "check_splits",
    "decode",
    "encode",
    "plain",
    "row_bytes",
    "type_name",
    "with_rows",
]

Codec = Literal["json", "pickle"]

_MOST_CALLS = 4096


class Call:
    """One operation as all ranks must agree on it, and as an error shows it.

    They need not agree on the note.
    """

    __slots__ = ("detail", "digest", "kind", "name", "note", "short_text", "text", "title")

    def __init__(self, kind: str, name: str, detail: tuple[Any, ...], note: str = "") -> None:
        self.kind, self.name, self.detail, self.note = kind, name, detail, note
        self.text = self.title = f"{kind}({name})" if name else kind
        if detail:
            self.text += f" of {', '.join(str(part) for part in detail)}"
        word = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        self.digest = int.from_bytes(word, "little") >> 1  # fits a signed 64-bit word
        if note:
            self.text += f" ({note})"
        self.short_text = self.text if len(self.text) <= 200 else self.text[:200] + " …"


class Calls:
    """Makes each call once: a training loop makes the same ones over and over."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Call] = {}

    def get(self, kind: str, name: str, detail: tuple[Any, ...], note: str = "") -> Call:
        """The call of an operation; ``detail`` is what else the ranks must agree on."""
        key = (kind, name, detail, note)
        call = self._made.get(key)
        if call is None:
            if len(self._made) > _MOST_CALLS:
                self._made.clear()
            call = self._made[key] = Call(kind, name, detail, note)
        return call


def check_root(root: int, size: int) -> None:
    """Refuse a ``root`` that is no rank."""
    if not 0 <= root < size:
        raise ConfigurationError(f"root={root} is no rank; expected 0 to {size - 1}.")


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """Put ranks in order; refuses what are not different ranks of ``size``."""
    wanted = tuple(sorted(ranks))
    if not wanted or len(set(wanted)) < len(wanted) or wanted[0] < 0 or wanted[-1] >= size:
        raise ConfigurationError(
            f"Received ranks {list(ranks)}; expected at least one, each once, of 0 to {size - 1}."
        )
    return wanted


def check_splits(rows: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return how many of ``rows`` go to each of ``size`` ranks; evenly without ``splits``."""
    if splits is None:
        if rows % size:
            raise ConfigurationError(
                f"alltoall without splits divides the rows evenly, and {rows} rows don't "
                f"divide by {size} ranks; pass splits."
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigurationError(
            f"splits={counts} don't fit: expected {size} numbers, none negative, that "
            f"add up to {rows} rows."
        )
    return counts


def with_rows(array: np.ndarray, operation: str) -> np.ndarray:
    """An array with a first axis whose bytes can be sent."""
    if array.ndim == 0:
        raise ConfigurationError(
            f"{operation} works along the first axis and received a scalar; pass an array of "
            "one element."
        )
    return plain(array, operation)


def plain(array: np.ndarray, operation: str) -> np.ndarray:
    """An array whose bytes can be sent."""
    if array.dtype.hasobject:
        raise ConfigurationError(
            f"{operation}: an array of type {array.dtype} can't be sent, its bytes mean nothing to "
            "other ranks. Pass numbers, or use broadcast_object or allgather_object."
        )
    return np.asarray(array, order="C")


def type_name(dtype: np.dtype) -> str:
    """The name of a type, with its byte order where that is not this machine's."""
    return dtype.name if dtype.isnative else dtype.str


def row_bytes(array: np.ndarray) -> int:
    """Bytes of one row of the first axis."""
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def as_bytes(array: np.ndarray) -> np.ndarray:
    """A flat view of the array's bytes."""
    return array.reshape(-1).view(np.uint8)


def encode(obj: Any, codec: Codec) -> np.ndarray:
    """The object as a flat uint8 array.

    Raises:
        ConfigurationError: JSON can't hold the object, or the codec is unknown.
    """
    if codec == "pickle":
        return np.frombuffer(pickle.dumps(obj), np.uint8)
    if codec != "json":
        raise ConfigurationError(f"codec={codec!r} is not known; expected 'json' or 'pickle'.")
    try:
        text = json.dumps(obj)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"An object of type {type(obj).__name__} can't be sent as JSON ({error}). Send plain "
            "dicts, lists, strings and numbers, or pass codec='pickle' if all ranks are yours."
        ) from None
    return np.frombuffer(text.encode(), np.uint8)


def decode(data: np.ndarray, codec: Codec) -> Any:
    """The object that ``encode`` made ``data`` from; JSON turns tuples into lists."""
    if codec == "pickle":
        return pickle.loads(data.tobytes())
    return json.loads(data.tobytes().decode())
