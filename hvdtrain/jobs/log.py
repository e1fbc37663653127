"""The log of a job: one process appends lines, and others may read them at any time.

``log/`` contains segments, named by the position of their first byte in the whole log
(``00000000000004194304.log``). A line of a segment is::

    1764168603.123 3 o the text

The line contains the time in seconds since 1970, the rank (``-`` for the launcher), ``o`` or ``e``
for stdout or stderr, and the text. When the log grows too long, segments in the middle are removed.
Readers notice such a gap because the next segment does not start at the end of the previous one.
Earlier versions also wrote an index (``.idx``) for each segment. Index files are ignored.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.jobs.files import append_whole, size_of

__all__ = [
    "LAUNCHER",
    "LogEntry",
    "LogLine",
    "LogPart",
    "LogWriter",
    "format_line",
    "log_end",
    "parse_line",
    "read_before",
    "read_log",
    "segment_path",
    "segments",
]

# The rank number of lines that the launcher printed.
LAUNCHER = -1
# The approximate size of a segment: a backward search reads a whole segment at a time.
SEGMENT_BYTES = 1 << 20
# Bytes at the beginning and at the end that are never removed.
HEAD_BYTES = 16 << 20
TAIL_BYTES = 256 << 20
_LINE = re.compile(rb"(\d+\.\d{3}) (-|\d+) ([oe]) (.*)", re.DOTALL)
_STREAMS = {b"o": "stdout", b"e": "stderr"}


class LogLine(NamedTuple):
    """A line that a rank or the launcher printed."""

    time_s: float  # when the launcher received it, in seconds since 1970
    rank: int  # the rank, or ``LAUNCHER``
    stream: str  # ``"stdout"`` or ``"stderr"``
    text: str  # the text without a newline


class LogEntry(NamedTuple):
    """A line of a log, or a gap where lines have been removed."""

    begin: int  # the position of the line in the whole log
    end: int  # the position after the line
    line: LogLine | None  # the line; None if the bytes from ``begin`` to ``end`` have been removed


class LogPart(NamedTuple):
    """The result of a search in a part of a log."""

    entries: list[LogEntry]  # the matching lines, and the gaps
    begin: int  # the position where the search stopped
    end: int  # the end of the last complete line


class LogWriter:
    """The only writer of a log, whose folder may already exist."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._segment = max(segments(folder), default=0)
        self._descriptor = self._open(self._segment)
        self._end = self._segment + os.fstat(self._descriptor).st_size

    def append(self, lines: Sequence[LogLine]) -> None:
        """Append all lines, or none if that fails."""
        if not lines:
            return
        if self._end - self._segment >= SEGMENT_BYTES:
            descriptor = self._open(self._end)
            os.close(self._descriptor)
            self._descriptor, self._segment = descriptor, self._end
            self._remove_middle()
        size = append_whole(self._descriptor, b"".join(map(format_line, lines)))
        self._end = self._segment + size

    def close(self) -> None:
        """Close the current segment."""
        os.close(self._descriptor)

    def _open(self, begin: int) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(segment_path(self._folder, begin), flags, 0o600)

    def _remove_middle(self) -> None:
        for begin, end in itertools.pairwise(segments(self._folder)):
            if begin >= HEAD_BYTES and end <= self._end - TAIL_BYTES:
                segment_path(self._folder, begin).unlink(missing_ok=True)


def read_log(folder: Path, begin: int = 0, end: int | None = None) -> Iterator[LogEntry]:
    """Yield the complete lines and the gaps of a log.

    Args:
        folder: The folder of the segments.
        begin: The position to start at: 0 or the end of a line.
        end: The position to stop at: the end of a line. By default the end of the log.
    """
    position = begin
    for start in segments(folder):
        path, segment_end = segment_path(folder, start), _segment_end(folder, start)
        if segment_end <= position:
            continue
        if end is not None and position >= end:
            return
        if start > position:
            yield LogEntry(position, start, None)
            position = start
        try:
            file = path.open("rb")
        except FileNotFoundError:
            # The writer has removed the segment in the meantime.
            continue
        with file:
            file.seek(position - start)
            while end is None or position < end:
                data = file.readline()
                if not data.endswith(b"\n"):
                    break
                if (line := parse_line(data)) is not None:
                    yield LogEntry(position, position + len(data), line)
                position += len(data)
        # A writer that was killed may have left an incomplete line.
        position = max(position, segment_end)


def read_before(
    folder: Path,
    end: int,
    count: int,
    matches: Callable[[LogLine], bool] = lambda line: True,
    *,
    patience_s: float = math.inf,
) -> LogPart:
    """Return the last ``count`` matching lines before a position, and the gaps between them.

    Args:
        folder: The folder of the segments.
        end: The position to search back from: the beginning of a line, or the end of the log.
        count: The number of lines.
        matches: A function that returns whether a line matches.
        patience_s: Seconds after which the search stops, even if it has found fewer lines.
    """
    until = time.monotonic() + patience_s
    starts = [start for start in segments(folder) if start < end]
    entries: list[LogEntry] = []
    begin, last = end, end
    while starts and len(entries) < count and time.monotonic() < until:
        starts.pop()
        stop, begin = begin, _segment_end(folder, starts[-1]) if starts else 0
        earlier = list(read_log(folder, begin, stop))
        if stop == end:
            # The log may end with an incomplete line.
            last = earlier[-1].end if earlier else begin
        entries = [e for e in earlier if e.line is None or matches(e.line)] + entries
    if len(entries) > count:
        entries = entries[len(entries) - count :]
        begin = entries[0].begin if entries else end
    return LogPart(entries, begin, last)


def log_end(folder: Path) -> int:
    """Return the position of the current end of the log."""
    return _segment_end(folder, max(segments(folder), default=0))


def _segment_end(folder: Path, start: int) -> int:
    return start + size_of(segment_path(folder, start))


def format_line(line: LogLine) -> bytes:
    """Return a line as it is stored, with a newline."""
    rank = "-" if line.rank == LAUNCHER else line.rank
    # Text from JSON may contain lone surrogates.
    text = line.text.replace("\n", " ").encode(errors="backslashreplace")
    letter = "o" if line.stream == "stdout" else "e"
    return f"{line.time_s:.3f} {rank} {letter} ".encode() + text + b"\n"


def parse_line(data: bytes) -> LogLine | None:
    """Parse a stored line, with or without its newline; return None if it is not valid."""
    match = _LINE.fullmatch(data.removesuffix(b"\n"))
    if match is None:
        return None
    time_s, rank, letter, text = match.groups()
    return LogLine(
        time_s=float(time_s),
        rank=LAUNCHER if rank == b"-" else int(rank),
        stream=_STREAMS[letter],
        text=text.decode(errors="replace"),
    )


def segment_path(folder: Path, begin: int) -> Path:
    """Return the path of the segment that starts at a position."""
    return folder / f"{begin:020}.log"


def segments(folder: Path) -> list[int]:
    """Return the positions at which the existing segments start, in order."""
    try:
        return sorted(int(path.stem) for path in folder.iterdir() if path.suffix == ".log")
    except FileNotFoundError:
        return []
