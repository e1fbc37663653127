"""What the layers of a model hold as attributes, also in lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["held_by"]

Kind = TypeVar("Kind")


def held_by(layer: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The objects of a kind among a layer's attributes, those of its own layers aside."""
    return _within(vars(layer), kind, set())


def _within(value: Any, kind: type[Kind], seen: set[int]) -> Iterator[Kind]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _within(entry, kind, seen)
