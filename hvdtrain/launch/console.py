"""What the person who started the job sees: the ranks' lines, each with its rank."""

from __future__ import annotations

import itertools
import os
import time
from typing import TextIO

__all__ = ["Console"]

_ERASE = "\r\x1b[K"
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"


class Console:
    """Prints whole lines above the chief's status, where the output is a terminal.

    Args:
        stdout: For what ranks write to theirs.
        stderr: For what ranks write to theirs, and for the launcher's own words.
        ranks: Ranks in the job; for the width of the tags.
        with_host: Whether tags name the host.
        chief_only: Show nothing of other ranks, and the chief's lines as they are.
        timestamps: Begin each line with the local time.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        *,
        ranks: int,
        with_host: bool,
        chief_only: bool,
        timestamps: bool = False,
    ) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._coloured = {name: stream.isatty() for name, stream in self._streams.items()}
        self._width = len(str(max(ranks - 1, 0)))
        self._with_host = with_host
        self._chief_only = chief_only
        self._timestamps = timestamps
        self._lost: set[int] = set()
        self._status = ""

    def show_all(self) -> None:
        """From now on show every rank: what goes wrong is not the chief's affair alone."""
        self._chief_only = False

    def leave_behind(self, rank: int) -> None:
        """The others go on without this rank; the first that is left is the chief."""
        if rank == self._chief:
            self.status(rank, "")
        self._lost.add(rank)

    @property
    def _chief(self) -> int:
        return next(rank for rank in itertools.count() if rank not in self._lost)

    def line(self, rank: int, host: str, stream: str, text: str) -> None:
        """One line of a rank."""
        if self._chief_only and rank != self._chief:
            return
        if self._chief_only:
            self._print(stream, text)
            return
        tag = f"[{rank:>{self._width}}" + (f" {host}]" if self._with_host else "]")
        if self._coloured[stream]:
            tag = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{tag}{_RESET}"
        self._print(stream, f"{tag} {text}")

    def notice(self, text: str) -> None:
        """The launcher's own words."""
        for line in text.splitlines():
            self._print("stderr", f"hvdtrain run: {line}")

    def status(self, rank: int, text: str) -> None:
        """What a rank draws over and over; the chief's is shown, on a terminal."""
        if rank == self._chief and self._coloured["stdout"]:
            self._status = text
            self._write("stdout", _ERASE + text)

    def _print(self, stream: str, line: str) -> None:
        if self._timestamps:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"
        if self._status and self._coloured[stream]:
            self._write(stream, f"{_ERASE}{line}\n")
            self._write("stdout", self._status)
        else:
            self._write(stream, line + "\n")

    def _write(self, stream: str, text: str) -> None:
        out = self._streams[stream]
        try:
            try:
                out.write(text)
            except UnicodeEncodeError as error:
                # Progress bars are drawn with characters that not every locale has.
                out.write(text.encode(error.encoding, "replace").decode(error.encoding))
            out.flush()
        except OSError:
            # Whoever read the output (head, a terminal) has left, or the disk is full; the job
            # goes on. Python would fail at what is left in the buffer when it exits.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), out.fileno())
