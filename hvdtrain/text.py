"""Formats plurals, lists, ranges, tables and durations for messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "format_duration",
    "format_list",
    "format_ranges",
    "format_table",
    "parse_ranges",
    "plural",
]

# Longer lists end with a count, so that messages stay readable with a thousand hosts and ranks.
_MAX_LISTED = 8
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def plural(number: int, thing: str) -> str:
    """Format a number of things: "1 rank", "2 ranks"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def format_list(things: Iterable[object], noun: str = "") -> str:
    """List the first eight things and count the others: "a, b, 2 more hosts"."""
    parts = [str(thing) for thing in things]
    more = len(parts) - _MAX_LISTED
    rest = [f"{more} more {noun}".rstrip()] if more > 0 else []
    return ", ".join([*parts[:_MAX_LISTED], *rest])


def format_ranges(numbers: Iterable[int]) -> list[str]:
    """Sort numbers and join runs of three or more: 6, 5, 2, 1, 0 becomes ``["0-2", "5", "6"]``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges: list[str] = []
    for run in runs:
        ranges += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return ranges


def parse_ranges(text: str) -> list[range]:
    """Parse comma-separated numbers and ranges, such as ``0-3,5,6``.

    Raises:
        ValueError: If an entry is neither a number nor an ascending range.
    """
    ranges = []
    for entry in text.split(","):
        first, dash, last = entry.strip().partition("-")
        ends = [first, last if dash else first]
        if not all(end.isascii() and end.isdecimal() for end in ends) or int(first) > int(ends[1]):
            raise ValueError(f"{entry!r} is neither a number nor a range such as 0-3")
        ranges.append(range(int(first), int(ends[1]) + 1))
    return ranges


def format_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = ()
) -> str:
    """Format a table. Columns are right-aligned, unless their index is in ``left``."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def format_duration(seconds: float) -> str:
    """Format a duration in at most two units: ``3 h 5 min``."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 ")) or "0 s"
