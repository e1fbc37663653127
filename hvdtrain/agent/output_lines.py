"""A program's output as it comes out of a pipe: whole lines, and a status that is redrawn."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from hvdtrain.agent.messages import LONGEST_LINE

__all__ = ["LineSplitter"]

LONGEST_STATUS = 1 << 12
_ERASE = "\x1b[K"


class LineSplitter:
    """Cuts the bytes of one stream into lines.

    What a program writes over with a carriage return, such as a progress bar, is a status: only
    its latest state counts.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self.status = ""

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[str]:
        """The lines that ``data`` completes, without their ends; with ``final`` also the rest."""
        self._rest += self._decoder.decode(data, final)
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            yield from self._cut(_visible(line))
        if "\r" in self._rest:
            shown = _visible(self._rest)[:LONGEST_LINE]
            self.status = shown[:LONGEST_STATUS]
            # Whether the cursor is at the line's beginning decides what the next text does.
            self._rest = "\r" + shown + ("\r" if self._rest.endswith("\r") else "")
        else:
            if lines:
                self.status = ""
            while len(self._rest) > LONGEST_LINE:
                yield self._rest[:LONGEST_LINE]
                self._rest = self._rest[LONGEST_LINE:]
        if final:
            rest, self._rest, self.status = _visible(self._rest), "", ""
            if rest:
                yield rest

    def _cut(self, line: str) -> Iterator[str]:
        for start in range(0, max(1, len(line)), LONGEST_LINE):
            yield line[start : start + LONGEST_LINE]


def _visible(line: str) -> str:
    """Return what is left to see of a line after its carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2].replace(_ERASE, "")
