"""The launcher's output: tagged lines of ranks, the chief's status line, and the screen.

Most lines are printed by every rank of the job. Equal lines that appear at about the same time are
shown once. Threads write the screen, so that a slow reader never blocks the launcher.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from hvdtrain.agent.backlog import BackgroundWriter
from hvdtrain.text import format_ranges, plural

__all__ = ["TF_LOG_LEVEL", "Console", "Screen", "ScreenStream", "early_info_filter", "is_redrawn"]

# How long a line waits for the same line from other ranks.
WINDOW_S = 0.3
# Maximum number of waiting lines per rank.
MAX_WAITING = 500
_MAX_CHARACTERS = 20
# Matches the time in a log line, and the thread if the line has one. Comparisons ignore both.
# TensorFlow's C++ code prints "W0000 00:00:1795552261.046417   17820 port.cc:153] ...". Python's
# logging and TensorFlow before 2.19 print "2026-11-24 20:29:51.123456: W ...".
_TIME = re.compile(r"(?<=^[IWEF])\d{4} [\d:.]+ +\d+|^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")
# Sets the log level of TensorFlow's C++ code; 1 hides the level INFO.
TF_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# TensorFlow's first INFO messages, which have zeros as their date. TensorFlow prints them before it
# reads the variable.
_EARLY_INFO = re.compile(
    r"I0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)

_ERASE = "\r\x1b[K"
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"
# Wider than any terminal.
_UNBOUNDED = 1 << 16


def is_redrawn(stream: TextIO | ScreenStream, environ: Mapping[str, str]) -> bool:
    """Return whether ``stream`` is a terminal whose last line can be redrawn."""
    return stream.isatty() and environ.get("TERM") != "dumb"


def early_info_filter(environ: Mapping[str, str]) -> Callable[[str], bool]:
    """Return a function that finds TensorFlow's INFO lines that ``TF_LOG_LEVEL`` should hide."""
    level = environ.get(TF_LOG_LEVEL, "1")
    if level.isdecimal() and int(level) >= 1:
        return lambda line: _EARLY_INFO.match(line) is not None
    return lambda line: False


class _Line(NamedTuple):
    """A line that waits to be shown. All lines with the same ``key`` are shown once."""

    host: str
    stream: str
    text: str
    at_s: float
    key: tuple[str, str]


class _LineQueues:
    """A queue of lines for each rank. Equal lines at the front are taken together."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._queues: dict[int, deque[_Line]] = {}
        self._waiting: Counter[tuple[str, str]] = Counter()

    def add(self, rank: int, host: str, stream: str, text: str, now: float) -> None:
        """Append a line of ``rank``."""
        key = (stream, _TIME.sub("", text, count=1))
        self._queues.setdefault(rank, deque()).append(_Line(host, stream, text, now, key))
        self._waiting[key] += 1

    def take(self, now: float) -> Iterator[tuple[_Line, Mapping[int, str]]]:
        """Remove and yield each line that is due, with the hosts of the ranks that printed it.

        A line is due if all ranks have printed it, or if it has waited long enough. Each rank's
        lines stay in order: if a due line is also in another rank's queue, but not at the front of
        that queue, the due lines before it in that queue go first.
        """
        while self._queues:
            fronts: dict[tuple[str, str], list[int]] = {}
            for rank, queue in self._queues.items():
                fronts.setdefault(queue[0].key, []).append(rank)
            due = {key: ranks for key, ranks in fronts.items() if self._is_due(ranks, now)}
            if not due:
                return
            complete = [
                ranks
                for key, ranks in due.items()
                if len(ranks) == self._ranks or len(ranks) == self._waiting[key]
            ]
            for ranks in complete or [min(due.values(), key=self._since)]:
                yield self._pop(ranks)

    def _is_due(self, ranks: Sequence[int], now: float) -> bool:
        return (
            len(ranks) == self._ranks
            or now - self._since(ranks) >= WINDOW_S
            or any(len(self._queues[rank]) > MAX_WAITING for rank in ranks)
        )

    def _since(self, ranks: Sequence[int]) -> float:
        return min(self._queues[rank][0].at_s for rank in ranks)

    def _pop(self, ranks: Sequence[int]) -> tuple[_Line, Mapping[int, str]]:
        lines = {rank: self._queues[rank].popleft() for rank in ranks}
        first = min(lines.values(), key=lambda line: line.at_s)
        self._waiting[first.key] -= len(lines)
        if not self._waiting[first.key]:
            del self._waiting[first.key]
        for rank in ranks:
            if not self._queues[rank]:
                del self._queues[rank]
        return first, {rank: line.host for rank, line in lines.items()}


class Console:
    """Prints whole lines. On a terminal, the chief's status line stays below them.

    Args:
        stdout: Receives what ranks write to their stdout.
        stderr: Receives what ranks write to their stderr, and the launcher's messages.
        ranks: The number of ranks.
        with_host: Whether the tag at the beginning of each line names the host of the rank.
        chief_only: Show only the chief's lines, without tags.
        timestamps: Begin each line with the local time.
        collapse: Show equal lines of several ranks once. The caller must then call ``review``
            often, and ``flush`` at the end.
        environ: Environment variables. TERM and NO_COLOR are used.
    """

    def __init__(
        self,
        stdout: TextIO | ScreenStream,
        stderr: TextIO | ScreenStream,
        *,
        ranks: int,
        with_host: bool = False,
        chief_only: bool = False,
        timestamps: bool = False,
        collapse: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        environ = environ or {}
        self._redrawn = {
            name: is_redrawn(stream, environ) for name, stream in self._streams.items()
        }
        self._has_colours = not environ.get("NO_COLOR")
        self._width = len(str(max(ranks - 1, 0)))
        self._with_host = with_host
        self._chief_only = chief_only
        self._timestamps = timestamps
        self._queues = _LineQueues(ranks) if collapse else None
        self._lost: set[int] = set()
        self._status = ""

    def show_all(self) -> None:
        """Show all ranks from now on."""
        self._chief_only = False

    def drop_rank(self, rank: int) -> None:
        """Continue without a lost rank. The lowest remaining rank becomes the chief."""
        if rank == self._chief:
            self.status(rank, "")
        self._lost.add(rank)

    @property
    def _chief(self) -> int:
        return next(rank for rank in itertools.count() if rank not in self._lost)

    def line(self, rank: int, host: str, stream: str, text: str) -> None:
        """Show a line of a rank, or queue it if lines are collapsed."""
        if self._chief_only:
            if rank == self._chief:
                self._print(stream, text)
        elif self._queues is None:
            self._print(stream, f"{self._tag({rank: host}, stream)} {text}")
        else:
            self._queues.add(rank, host, stream, text, time.monotonic())

    def review(self, now: float | None = None) -> None:
        """Print the queued lines that are due."""
        if self._queues is not None:
            for line, hosts in self._queues.take(time.monotonic() if now is None else now):
                self._print(line.stream, f"{self._tag(hosts, line.stream)} {line.text}")

    def flush(self) -> None:
        """Print all queued lines."""
        self.review(float("inf"))

    def notice(self, text: str) -> None:
        """Show a message from the launcher."""
        self.flush()
        for line in text.splitlines():
            self._print("stderr", f"hvdtrain run: {line}")

    def status(self, rank: int, text: str) -> None:
        """Redraw the status line. Only the chief's status is shown, and only on a terminal."""
        if rank == self._chief and self._redrawn["stdout"]:
            # A line that wraps could not be erased. The window may have been resized, so look up
            # its width each time.
            self._status = text[: _columns(self._streams["stdout"]) - 1]
            self._write("stdout", _ERASE + self._status)

    def _tag(self, hosts: Mapping[int, str], stream: str) -> str:
        tag = f"{_format_ranks(list(hosts)):>{self._width}}"
        if self._with_host and len(names := set(hosts.values())) == 1:
            tag += f" {names.pop()}"
        if not self._redrawn[stream] or not self._has_colours or len(hosts) > 1:
            return f"[{tag}]"
        return f"\x1b[{_COLOURS[min(hosts) % len(_COLOURS)]}m[{tag}]{_RESET}"

    def _print(self, stream: str, line: str) -> None:
        if self._timestamps:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"
        if self._status and self._redrawn[stream]:
            self._write(stream, f"{_ERASE}{line}\n")
            self._write("stdout", self._status)
        else:
            self._write(stream, line + "\n")

    def _write(self, stream: str, text: str) -> None:
        self._streams[stream].write(text)
        self._streams[stream].flush()


def _columns(stream: TextIO | ScreenStream) -> int:
    try:
        # The size of a pseudo-terminal may be 0.
        return os.get_terminal_size(stream.fileno()).columns or _UNBOUNDED
    except (OSError, ValueError):
        return _UNBOUNDED


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "0-7" or "0-3,7"; abbreviate a long list."""
    runs = format_ranges(ranks)
    text = ",".join(runs)
    return text if len(text) <= _MAX_CHARACTERS else f"{','.join(runs[:3])},... {len(ranks)} ranks"


class Screen:
    """Stdout and stderr, written by threads. If both are the same file, they share a queue.

    A slow reader slows the ranks down. A reader that pauses, such as ``less`` or a terminal after
    Ctrl-S, delays the ranks only for a few seconds. After that, the oldest lines are dropped, and a
    message says how many.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._writers: dict[tuple[int, int], BackgroundWriter] = {}
        self.stdout, self.stderr = self._output(stdout), self._output(stderr)

    @property
    def holds_up(self) -> bool:
        """Whether ranks should pause until more has been read."""
        return any(writer.should_pause for writer in self._writers.values())

    def close(self, patience_s: float, give_up: Callable[[], bool]) -> None:
        """Wait until all output has been read.

        Give up if nothing is read for ``patience_s`` seconds, or if ``give_up()`` returns true.
        """
        for writer in self._writers.values():
            writer.close(patience_s, give_up)

    def _output(self, stream: TextIO) -> TextIO | ScreenStream:
        try:
            status = os.fstat(stream.fileno())
        except OSError:
            # An in-memory file, which never blocks.
            return stream
        file = (status.st_dev, status.st_ino)
        if file not in self._writers:
            self._writers[file] = _writer(stream)
        return ScreenStream(stream, self._writers[file])


class ScreenStream:
    """One of the streams of a ``Screen``."""

    def __init__(self, stream: TextIO, writer: BackgroundWriter) -> None:
        self._stream = stream
        self._writer = writer
        self.isatty = stream.isatty
        self.fileno = stream.fileno

    def write(self, text: str, /) -> None:
        """Queue ``text``. Characters that the encoding lacks become question marks."""
        self._writer.write(text.encode(self._stream.encoding, "replace"))

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as possible."""


def _writer(stream: TextIO) -> BackgroundWriter:
    stream.flush()
    # On a terminal, a status line may have to be erased first.
    erase = _ERASE if stream.isatty() else ""

    def gap(dropped: int) -> bytes:
        return f"{erase}hvdtrain run: {plural(dropped, 'line')} skipped: reader too slow\n".encode()

    def fails(error: OSError) -> bool:
        # The reader (head, a terminal) has closed, or the disk is full. The job continues, with its
        # output in /dev/null. Otherwise Python would fail when it flushes the stream at exit.
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), stream.fileno())
        return False

    return BackgroundWriter(stream.fileno(), gap=gap, fails=fails)
