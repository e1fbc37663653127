"""What a script's reader is told of one of its lines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, order=True)
class Finding:
    """One thing about one line.

    Args:
        line: Counted from 1.
        text: A sentence on the matter, and one on what to do.
        note: Whether the script works as it is.
    """

    line: int
    text: str
    note: bool = False
