"""The launcher's output, for whoever started the job: the ranks' lines, each with its rank."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from hvdtrain.launch.line_collapse import Group, LineCollapse, describe_ranks

__all__ = ["Console", "Output", "is_redrawn"]

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
        self._collapse = LineCollapse(ranks) if collapse else None
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

    def review(self) -> None:
        """Print lines that have waited long enough for the same of other ranks."""
        if self._collapse is not None:
            self._print_groups(self._collapse.take(time.monotonic()))

    def flush(self) -> None:
        """Print all lines that still wait."""
        if self._collapse is not None:
            self._print_groups(self._collapse.take_all())

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
        tag = f"{describe_ranks(list(hosts)):>{self._width}}"
        if self._with_host and len(names := set(hosts.values())) == 1:
            tag += f" {names.pop()}"
        if not self._redrawn[stream] or not self._has_colours or len(hosts) > 1:
            return f"[{tag}]"
        return f"\x1b[{_COLOURS[min(hosts) % len(_COLOURS)]}m[{tag}]{_RESET}"

    def _print_groups(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._print(group.stream, f"{self._tag(group.hosts, group.stream)} {group.text}")

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
