"""Reads a job's log, a part at a time, also while it grows."""

from __future__ import annotations

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

__all__ = ["Found", "fits", "log_end", "read_last", "read_log"]

_MORE_EACH_TIME = 8


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


def read_log(
    folder: Path,
    begin: int = 0,
    *,
    ranks: Sequence[range] | None = None,
    wanted: Callable[[str], bool] | None = None,
) -> Iterator[Found]:
    """What is in a log from a position on, up to the last whole line that there is now.

    Args:
        folder: Where its segments lie.
        begin: Where a line begins: the end of another, or 0.
        ranks: Whose lines; None for all.
        wanted: Whether a text is; None for all.
    """
    position = begin
    for start in segments(folder):
        path = segment_path(folder, start)
        end = start + _size(path)
        if end <= position:
            continue
        if start > position:
            yield Found(begin=position, end=start, line=None)
        for first, last in _spans(path, max(start, position), ranks):
            for found in _read_lines(path, start, first, last):
                if found.line is not None and fits(found.line, ranks, wanted):
                    yield found
        position = end


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
    end = log_end(folder)
    span = BLOCK_BYTES
    while True:
        begin = _line_from(folder, max(0, end - span))
        found = list(read_log(folder, begin, ranks=ranks, wanted=wanted))
        if begin == 0 or sum(one.line is not None for one in found) >= lines:
            return found[-lines:] if lines else []
        span *= _MORE_EACH_TIME


def log_end(folder: Path) -> int:
    """The position behind the last byte that there is now."""
    known = segments(folder)
    return known[-1] + _size(segment_path(folder, known[-1])) if known else 0


def _line_from(folder: Path, position: int) -> int:
    """Where the first line begins that begins at a position or later."""
    known = [start for start in segments(folder) if start < position]
    if not known:
        return position
    with segment_path(folder, known[-1]).open("rb") as file:
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
