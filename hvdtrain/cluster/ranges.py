"""Hosts and ranks in messages and tables, which must stay readable for a thousand of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["counted", "format_table", "listing"]

# Shown before the rest is counted.
_LISTED = 8


def counted(number: int, thing: str) -> str:
    """So many of a thing: "1 rank", "2 ranks"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listing(things: Iterable[object], what: str = "") -> str:
    """Some of them, and how many more.

    Args:
        things: The things to list, as ``str`` gives them.
        what: The noun for them where they are counted: "2 more hosts".
    """
    parts = [str(thing) for thing in things]
    more = len(parts) - _LISTED
    return ", ".join([*parts[:_LISTED], *([f"{more} more {what}".rstrip()] if more > 0 else [])])


def format_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = ()
) -> str:
    """Columns under their heads, aligned right, those whose numbers ``left`` holds left."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
