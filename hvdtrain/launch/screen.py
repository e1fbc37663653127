"""The launcher's stdout and stderr, written without ever waiting for the reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from hvdtrain.agent.backlog import BackgroundWriter
from hvdtrain.cluster.ranges import counted
from hvdtrain.launch.console import Output

__all__ = ["Screen"]


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
        return any(writer.holds_up for writer in self._writers.values())

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
        lines = counted(dropped, "line")
        return f"{before}hvdtrain run: {lines} not shown, as nobody read them\n".encode()

    def fails(error: OSError) -> bool:
        # The reader (head, a terminal) has left, or the disk is full; the job goes on. Python would
        # fail at what is printed later when it exits.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return False

    return BackgroundWriter(stream.fileno(), gap=gap, fails=fails)
