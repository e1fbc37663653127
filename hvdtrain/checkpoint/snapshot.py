"""The content of a checkpoint in memory, and its state as JSON that every parser reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.errors import CheckpointError

__all__ = ["Snapshot", "decode_state", "encode_state"]

# JSON has no infinity, where callbacks' "best so far" begins, and no NaN, where a loss may end.
# They are written as {"$float": "inf"}.
_FLOAT = "$float"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything of one moment of the training, in memory.

    Attributes:
        step: Completed optimizer steps of the whole training; names the checkpoint.
        state: Values that JSON can hold, and numbers that aren't finite: the epoch, the
            position in the data, callbacks. Tuples come back as lists.
        model: Weights and optimizer, by name.
        ranks: Arrays that differ by rank, under names such as ``rank/3/seed``.
    """

    step: int
    state: Mapping[str, Any]
    model: Mapping[str, np.ndarray]
    ranks: Mapping[str, np.ndarray]


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The text of state.json.

    Raises:
        CheckpointError: The state holds what JSON can't hold; the message says where.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"The state of a checkpoint is {type(state).__name__}; expected a dict."
        )
    try:
        text = json.dumps(_plain(state, "state"), allow_nan=False, indent=1)
    except RecursionError:
        raise CheckpointError(
            "The state of a checkpoint is nested too deeply or holds itself; make it flatter."
        ) from None
    return text.encode("ascii") + b"\n"


def decode_state(text: bytes) -> dict[str, Any]:
    """The state that ``encode_state`` was given.

    Raises:
        ValueError: The text is no such JSON.
    """
    try:
        state = json.loads(text, object_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(state, dict):
        raise ValueError("it holds no JSON object")
    return state


def _plain(value: Any, place: str) -> Any:
    """The value in types that the json module writes and reads alike."""
    # Exact types: subclasses, such as NumPy's float64 and enumerations, would come back as others.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _key(key, place): _plain(entry, f"{place}[{key!r}]") for key, entry in value.items()
        }
    raise CheckpointError(
        f"{place} is {kind.__module__}.{kind.__qualname__}, which JSON can't hold; expected None, "
        "bool, int, float, str, or a list or dict of these. Convert it, for example with float(), "
        "or put arrays into the snapshot's model or ranks."
    )


def _key(key: Any, place: str) -> str:
    if type(key) is not str or key == _FLOAT:
        raise CheckpointError(
            f"{place} has the key {key!r} of type {type(key).__name__}; expected a str other "
            f"than {_FLOAT!r}. Rename or convert it."
        )
    return key


def _object(content: dict[str, Any]) -> Any:
    return float(str(content[_FLOAT])) if set(content) == {_FLOAT} else content
