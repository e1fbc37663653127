"""Counts, lists, durations and tables in messages; readable for a thousand hosts and ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["counted", "format_table", "listing", "number_runs", "parse_runs", "span"]

# Shown before the rest is counted.
_LISTED = 8
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def counted(number: int, thing: str) -> str:
    """Format a number of things: "1 rank", "2 ranks"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listing(things: Iterable[object], what: str = "") -> str:
    """List the first of some things, and say how many more there are.

    Args:
        things: The things to list, as ``str`` gives them.
        what: The noun for them where they are counted: "2 more hosts".
    """
    parts = [str(thing) for thing in things]
    more = len(parts) - _LISTED
    return ", ".join([*parts[:_LISTED], *([f"{more} more {what}".rstrip()] if more > 0 else [])])


def number_runs(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers, three and more in a row as one: ``["0-3", "5", "6"]``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return words


def parse_runs(text: str) -> list[range]:
    """Read what ``number_runs`` wrote, joined by commas: ``0-3,5,6``.

    Raises:
        ValueError: It is something else.
    """
    runs = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        ends = [first, last if dash else first]
        if not all(end.isascii() and end.isdecimal() for end in ends) or int(first) > int(ends[1]):
            raise ValueError(f"{word!r} is neither a number nor a range such as 0-3")
        runs.append(range(int(first), int(ends[1]) + 1))
    return runs


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


def span(seconds: float) -> str:
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
