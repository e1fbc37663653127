"""The format of a job's log on the disk.

``log/`` holds segments, each named by the position of its first byte in the whole log
(``00000000000004194304.log``), and beside each an index (``.idx``). A line of a segment is::

    1764168603.123 3 o the text

with the time in seconds since 1970, the rank (``-`` for the launcher), ``o`` or ``e`` for stdout or
stderr, and what was said. An index has a line of JSON for each block of 64 KiB, with the positions
where it begins and ends, the time of its first line, and the ranks in it; what is not in an index
yet is read as it is. Segments of the middle are removed when the log grows too long: where one
does not begin at the end of the one before, lines are missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cluster.ranges import number_runs, parse_runs

__all__ = [
    "BLOCK_BYTES",
    "LAUNCHER",
    "Block",
    "LogLine",
    "block_from_json",
    "format_line",
    "parse_line",
    "segment_path",
    "segments",
]

BLOCK_BYTES = 64 << 10
# In place of a rank.
LAUNCHER = -1
_LINE = re.compile(rb"(\d+\.\d{3}) (-|\d+) ([oe]) (.*)", re.DOTALL)
_STREAMS = {"stdout": "o", "stderr": "e"}
_NAMES = {letter: stream for stream, letter in _STREAMS.items()}


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line that somebody wrote.

    Attributes:
        time_s: When the launcher heard of it, in seconds since 1970.
        rank: Who wrote it; ``LAUNCHER`` for the launcher itself.
        stream: ``"stdout"`` or ``"stderr"``.
        text: Without its end.
    """

    time_s: float
    rank: int
    stream: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some lines of a segment.

    Attributes:
        begin: Position of its first byte in the whole log.
        end: Position behind its last byte.
        time_s: The time of its first line.
        ranks: Whose lines are in it.
    """

    begin: int
    end: int
    time_s: float
    ranks: Sequence[range]

    def to_json(self) -> dict[str, object]:
        """Return it as the index holds it."""
        ranks = [rank for run in self.ranks for rank in run if rank != LAUNCHER]
        words = number_runs(ranks) + (["-"] if any(LAUNCHER in run for run in self.ranks) else [])
        return {"begin": self.begin, "end": self.end, "time": self.time_s, "ranks": ",".join(words)}


def block_from_json(content: dict[str, object]) -> Block | None:
    """Read what ``Block.to_json`` made; None for something else."""
    begin, end, time_s = content.get("begin"), content.get("end"), content.get("time")
    words = str(content.get("ranks")).split(",")
    if not isinstance(begin, int) or not isinstance(end, int) or not isinstance(time_s, float):
        return None
    ranks = [range(LAUNCHER, LAUNCHER + 1)] if "-" in words else []
    try:
        ranks += [run for word in words if word not in ("-", "") for run in parse_runs(word)]
    except ValueError:
        return None
    return Block(begin=begin, end=end, time_s=time_s, ranks=ranks)


def format_line(line: LogLine) -> bytes:
    """A line as it lies on the disk, with its end."""
    rank = "-" if line.rank == LAUNCHER else line.rank
    # What came through JSON may hold halves of characters.
    text = line.text.replace("\n", " ").encode(errors="backslashreplace")
    return f"{line.time_s:.3f} {rank} {_STREAMS[line.stream]} ".encode() + text + b"\n"


def parse_line(data: bytes) -> LogLine | None:
    """Parse what ``format_line`` wrote, with or without its end; None for something else."""
    found = _LINE.fullmatch(data.removesuffix(b"\n"))
    if found is None:
        return None
    time, rank, stream, text = found.groups()
    return LogLine(
        time_s=float(time),
        rank=LAUNCHER if rank == b"-" else int(rank),
        stream=_NAMES[stream.decode()],
        text=text.decode(errors="replace"),
    )


def segment_path(folder: Path, begin: int) -> Path:
    """The segment whose first byte has that position."""
    return folder / f"{begin:020}.log"


def segments(folder: Path) -> list[int]:
    """Return where the segments that are there begin, in their order."""
    try:
        return sorted(int(path.stem) for path in folder.iterdir() if path.suffix == ".log")
    except FileNotFoundError:
        return []
