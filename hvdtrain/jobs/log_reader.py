"""Reads a job's log, a part at a time, also while it grows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hvdtrain.jobs.json_lines import read_json_lines
from hvdtrain.jobs.log_format import (
    BLOCK_BYTES,
    LogLine,
    block_from_json,
    parse_line,
    segment_path,
    segments,
)

__all__ = ["Found", "Part", "fits", "log_end", "read_before", "read_last", "read_log"]

_MORE_EACH_TIME = 8
# What is looked through before the clock is looked at again.
_MOST_SPAN = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """A line of a log, or that some are missing.

    Attributes:
        begin: Its position in the whole log.
        end: The position behind it.
        line: The line; None where what was from ``begin`` to ``end`` has been removed.
    """

    begin: int
    end: int
    line: LogLine | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The lines that were found in a part of a log.

    Attributes:
        found: The lines that fit, and what is missing.
        begin: From where on was looked.
        end: Up to where there are whole lines.
    """

    found: list[Found]
    begin: int
    end: int


def read_log(
    folder: Path,
    begin: int = 0,
    end: int | None = None,
    *,
    ranks: Sequence[range] | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> Iterator[Found]:
    """Yield what is in a log from a position on, up to the last whole line that there is now.

    Args:
        folder: Where its segments lie.
        begin: Where a line begins: the end of another, or 0.
        end: The same; lines that begin there or later are left out.
        ranks: Whose lines; None for all.
        wanted: Whether a text is; None for all.
    """
    position = begin
    for start in segments(folder):
        path = segment_path(folder, start)
        segment_end = start + _size(path)
        if segment_end <= position:
            continue
        if end is not None and position >= end:
            return
        if start > position:
            yield Found(begin=position, end=start, line=None)
        for first, last in _spans(path, max(start, position), ranks):
            until = last if end is None else min(end, last or end)
            for found in _read_lines(path, start, first, until):
                if found.line is not None and fits(found.line, ranks, wanted):
                    yield found
        position = segment_end


def fits(
    line: LogLine, ranks: Sequence[range] | None, wanted: Callable[[str], bool] | None
) -> bool:
    """Whether a line is among those that ``read_log`` is asked for."""
    if ranks is not None and not any(line.rank in run for run in ranks):
        return False
    return wanted is None or wanted(line.text)


def read_last(
    folder: Path,
    lines: int,
    *,
    ranks: Sequence[range] | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> list[Found]:
    """The last so many lines that fit, and what is missing between them; as ``read_log``."""
    return read_before(folder, log_end(folder), lines, ranks=ranks, wanted=wanted).found


def read_before(
    folder: Path,
    end: int,
    lines: int,
    *,
    ranks: Sequence[range] | None = None,
    wanted: Callable[[str], bool] | None = None,
    patience_s: float = math.inf,
) -> Part:
    """The last so many lines that fit before a position, and what is missing between them.

    Args:
        folder: Where the segments lie.
        end: Where a line begins, or behind the last.
        lines: How many lines.
        ranks: Whose lines; None for all.
        wanted: Whether a text is; None for all.
        patience_s: After how long fewer lines will do.
    """
    until = time.monotonic() + patience_s
    found: list[Found] = []
    begin, span, last = end, BLOCK_BYTES, end
    while begin > 0 and len(found) < lines and time.monotonic() < until:
        stop, begin = begin, _line_from(folder, max(0, begin - span))
        if stop == end:
            # Behind the last whole line there may be a part of one.
            everything = list(read_log(folder, begin, stop))
            last = everything[-1].end if everything else begin
            earlier = [f for f in everything if f.line is None or fits(f.line, ranks, wanted)]
        else:
            earlier = list(read_log(folder, begin, stop, ranks=ranks, wanted=wanted))
        found = earlier + found
        # A line that is longer than that takes another try.
        span = span * _MORE_EACH_TIME if begin == stop else min(span * _MORE_EACH_TIME, _MOST_SPAN)
    if len(found) > lines:
        found = found[len(found) - lines :]
        begin = found[0].begin if found else end
    return Part(found=found, begin=begin, end=last)


def log_end(folder: Path) -> int:
    """The position behind the last byte that there is now."""
    known = segments(folder)
    return known[-1] + _size(segment_path(folder, known[-1])) if known else 0


def _line_from(folder: Path, position: int) -> int:
    """Return where the first line at a position or later begins, or what is missing there."""
    known = [start for start in segments(folder) if start < position]
    if not known:
        return 0
    path = segment_path(folder, known[-1])
    if position > known[-1] + _size(path):
        return known[-1] + _size(path)
    with path.open("rb") as file:
        file.seek(position - 1 - known[-1])
        return position - 1 + len(file.readline())


def _spans(
    path: Path, begin: int, ranks: Sequence[range] | None
) -> Iterator[tuple[int, int | None]]:
    """The parts of a segment from a position on that may hold lines of ``ranks``."""
    blocks = map(block_from_json, read_json_lines(path.with_suffix(".idx")))
    for block in blocks if ranks is not None else ():
        if block is None or block.end <= begin or _overlap(ranks or (), block.ranks):
            continue
        if begin < block.begin:
            yield begin, block.begin
        begin = block.end
    yield begin, None


def _overlap(runs: Sequence[range], others: Sequence[range]) -> bool:
    return any(
        max(run.start, other.start) < min(run.stop, other.stop) for run in runs for other in others
    )


def _read_lines(path: Path, start: int, begin: int, end: int | None) -> Iterator[Found]:
    try:
        file: BinaryIO = path.open("rb")
    except FileNotFoundError:
        # It was removed meanwhile.
        return
    with file:
        file.seek(begin - start)
        while end is None or begin < end:
            data = file.readline()
            if not data.endswith(b"\n"):
                return
            yield Found(begin=begin, end=begin + len(data), line=parse_line(data))
            begin += len(data)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
