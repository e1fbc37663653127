"""The launcher's output: lines of ranks with their tags, the chief's status, and the screen.

Ranks of a job print much the same. A line that several ranks print within a moment is shown once.
The screen is written by threads, so that a reader that pauses never blocks the launcher.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TextIO

from hvdtrain.agent.backlog import BackgroundWriter
from hvdtrain.text import format_ranges, plural

__all__ = ["Console", "Output", "Screen", "is_redrawn"]

# How long a line waits for the same line of other ranks.
WINDOW_S = 0.3
# No more lines of a rank wait: nobody reads so many one by one.
MOST_WAITING = 500
_MOST_CHARACTERS = 20
# The time at the beginning of a log line, and perhaps a thread, which comparisons ignore: of
# TensorFlow's C++ ("W0000 00:00:1795552261.046417   17820 port.cc:153] ..."), and of Python's
# logging and of TensorFlow before 2.19 ("2026-11-24 20:29:51.123456: W ...").
_TIME = re.compile(r"(?<=^[IWEF])\d{4} [\d:.]+ +\d+|^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")

_ERASE = "\r\x1b[K"
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"
# Wider than any terminal.
_UNBOUNDED = 1 << 16


class Output(Protocol):
    """The methods of a text file that the console needs."""

    def write(self, text: str, /) -> object:
        """Write text."""

    def flush(self) -> object:
        """Let it appear."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""

    def fileno(self) -> int:
        """The file descriptor."""


def is_redrawn(stream: Output, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a terminal whose last line can be written over."""
    return stream.isatty() and environ.get("TERM") != "dumb"


class _Line(NamedTuple):
    """A line that waits to be shown; lines with the same ``key`` are shown as one."""

    host: str
    stream: str
    text: str
    at_s: float
    key: tuple[str, str]


class _Group(NamedTuple):
    """A line to show, and the ranks that wrote it with their hosts."""

    line: _Line
    hosts: Mapping[int, str]


class _Collapse:
    """A queue of lines for each rank; lines at the front of several queues leave as one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._queues: dict[int, deque[_Line]] = {}
        self._waiting: Counter[tuple[str, str]] = Counter()

    def add(self, rank: int, host: str, stream: str, text: str, now: float) -> None:
        """Append a line of ``rank``."""
        key = (stream, _TIME.sub("", text, count=1))
        self._queues.setdefault(rank, deque()).append(_Line(host, stream, text, now, key))
        self._waiting[key] += 1

    def take(self, now: float) -> Iterator[_Group]:
        """Take out the lines that all ranks have written, and those that have waited long enough.

        A rank's lines stay in their order. Of those that are due, a line that some rank has yet to
        come to waits for what is in front of that.
        """
        while self._queues:
            fronts: dict[tuple[str, str], list[int]] = {}
            for rank, queue in self._queues.items():
                fronts.setdefault(queue[0].key, []).append(rank)
            due = {key: ranks for key, ranks in fronts.items() if self._are_due(ranks, now)}
            if not due:
                return
            ready = [
                ranks
                for key, ranks in due.items()
                if len(ranks) == self._ranks or len(ranks) == self._waiting[key]
            ]
            for ranks in ready or [min(due.values(), key=self._since)]:
                yield self._pop(ranks)

    def _are_due(self, ranks: Sequence[int], now: float) -> bool:
        return (
            len(ranks) == self._ranks
            or now - self._since(ranks) >= WINDOW_S
            or any(len(self._queues[rank]) > MOST_WAITING for rank in ranks)
        )

    def _since(self, ranks: Sequence[int]) -> float:
        return min(self._queues[rank][0].at_s for rank in ranks)

    def _pop(self, ranks: Sequence[int]) -> _Group:
        lines = {rank: self._queues[rank].popleft() for rank in ranks}
        first = min(lines.values(), key=lambda line: line.at_s)
        self._waiting[first.key] -= len(lines)
        if not self._waiting[first.key]:
            del self._waiting[first.key]
        for rank in ranks:
            if not self._queues[rank]:
                del self._queues[rank]
        return _Group(first, {rank: line.host for rank, line in lines.items()})


class Console:
    """Prints whole lines above the chief's status, where the output is a terminal.

    Args:
        stdout: For what ranks write to theirs.
        stderr: For what ranks write to theirs, and for the launcher's own words.
        ranks: Ranks in the job; for the width of the tags.
        with_host: Whether tags name the host.
        chief_only: Show nothing of other ranks, and the chief's lines as they are.
        timestamps: Begin each line with the local time.
        collapse: Show once what several ranks print within moments of one another; ``review`` is
            to be called often then, and ``flush`` at the end.
        environ: Tells what a terminal can do (TERM), and whether colours are wanted (NO_COLOR).
    """

    def __init__(
        self,
        stdout: Output,
        stderr: Output,
        *,
        ranks: int,
        with_host: bool,
        chief_only: bool,
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
        self._collapse = _Collapse(ranks) if collapse else None
        self._lost: set[int] = set()
        self._status = ""

    def show_all(self) -> None:
        """From now on show every rank: what goes wrong is not the chief's affair alone."""
        self._chief_only = False

    def leave_behind(self, rank: int) -> None:
        """Note that the others go on without this rank; the first that is left is the chief."""
        if rank == self._chief:
            self.status(rank, "")
        self._lost.add(rank)

    @property
    def _chief(self) -> int:
        return next(rank for rank in itertools.count() if rank not in self._lost)

    def line(self, rank: int, host: str, stream: str, text: str) -> None:
        """Show one line of a rank; where lines are collapsed, ``review`` does."""
        if self._chief_only:
            if rank == self._chief:
                self._print(stream, text)
        elif self._collapse is None:
            self._print(stream, f"{self._tag({rank: host}, stream)} {text}")
        else:
            self._collapse.add(rank, host, stream, text, time.monotonic())

    def review(self, now: float | None = None) -> None:
        """Print lines that have waited long enough for the same line of other ranks."""
        if self._collapse is not None:
            for line, hosts in self._collapse.take(time.monotonic() if now is None else now):
                self._print(line.stream, f"{self._tag(hosts, line.stream)} {line.text}")

    def flush(self) -> None:
        """Print all lines that still wait."""
        self.review(float("inf"))

    def notice(self, text: str) -> None:
        """Show the launcher's own words."""
        self.flush()
        for line in text.splitlines():
            self._print("stderr", f"hvdtrain run: {line}")

    def status(self, rank: int, text: str) -> None:
        """Show what a rank draws over and over: the chief's alone, and only on a terminal."""
        if rank == self._chief and self._redrawn["stdout"]:
            # A line that wraps could not be erased; the window may be another by now.
            self._status = text[: _columns(self._streams["stdout"]) - 1]
            self._write("stdout", _ERASE + self._status)

    def _tag(self, hosts: Mapping[int, str], stream: str) -> str:
        """Return the tag that stands in front of a line of the ranks in ``hosts``."""
        tag = f"{_describe_ranks(list(hosts)):>{self._width}}"
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


def _columns(stream: Output) -> int:
    try:
        # A pseudo-terminal may have no size.
        return os.get_terminal_size(stream.fileno()).columns or _UNBOUNDED
    except (OSError, ValueError):
        return _UNBOUNDED


def _describe_ranks(ranks: Sequence[int]) -> str:
    """Write ranks as 0-7 or 0,3 or 0-3,7; of a long list the beginning, and how many they are."""
    words = format_ranges(ranks)
    text = ",".join(words)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{','.join(words[:3])},... {len(ranks)} ranks"


class Screen:
    """The two streams; where they are the same file they share one queue, which keeps their order.

    A slow reader slows the ranks down. One that takes nothing for some seconds, such as ``less`` or
    a terminal after Ctrl-S, holds them up no longer: the oldest lines are dropped where too many
    wait, and a line tells the reader how many.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._writers: dict[tuple[int, int], BackgroundWriter] = {}
        self.stdout, self.stderr = self._output(stdout), self._output(stderr)

    @property
    def holds_up(self) -> bool:
        """Whether the ranks should pause until more is read."""
        return any(writer.should_pause for writer in self._writers.values())

    def close(self, patience_s: float, give_up: Callable[[], bool]) -> None:
        """Wait for the reader, unless ``give_up`` or if it takes nothing for ``patience_s``."""
        for writer in self._writers.values():
            writer.close(patience_s, give_up)

    def _output(self, stream: TextIO) -> Output:
        try:
            status = os.fstat(stream.fileno())
        except OSError:
            # In memory, where nothing blocks.
            return stream
        file = (status.st_dev, status.st_ino)
        if file not in self._writers:
            self._writers[file] = _writer(stream)
        return _ScreenStream(stream, self._writers[file])


class _ScreenStream:
    def __init__(self, stream: TextIO, writer: BackgroundWriter) -> None:
        self._stream = stream
        self._writer = writer
        self.isatty = stream.isatty
        self.fileno = stream.fileno

    def write(self, text: str, /) -> None:
        """Have ``text`` written; characters that the locale lacks become question marks."""
        self._writer.write(text.encode(self._stream.encoding, "replace"))

    def flush(self) -> None:
        """Do nothing: everything is written as soon as it can be."""


def _writer(stream: TextIO) -> BackgroundWriter:
    stream.flush()
    # On a terminal a status may stand where the line is to begin.
    before = "\r\x1b[K" if stream.isatty() else ""

    def gap(dropped: int) -> bytes:
        lines = plural(dropped, "line")
        return f"{before}hvdtrain run: {lines} not shown, as nobody read them\n".encode()

    def fails(error: OSError) -> bool:
        # The reader (head, a terminal) has left, or the disk is full; the job goes on. Python would
        # fail at what is printed later when it exits.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return False

    return BackgroundWriter(stream.fileno(), gap=gap, fails=fails)
