"""Relays a program's output to the launcher and into a file."""

from __future__ import annotations

import codecs
import os
import selectors
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain.agent.backlog import BackgroundWriter
from hvdtrain.agent.messages import ATTEMPT, MAX_LINE_LENGTH, OUTPUT_DIR, LauncherLink
from hvdtrain.text import plural

__all__ = ["LineSplitter", "OutputRelay"]

# If the disk makes no progress for this long, a rank ends even if some output is not written.
DISK_PATIENCE_S = 10.0
MAX_STATUS_LENGTH = 1 << 12
# More reads than it takes to empty a full pipe.
_MAX_READS = 100
_ERASE = "\x1b[K"


class LineSplitter:
    """Splits incoming bytes into lines.

    If the program overwrites text with a carriage return, as in a progress bar, that text is
    treated as a status. Only the latest status is kept.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self.status = ""

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[str]:
        """Yield the lines that ``data`` completes and, if ``final``, an incomplete last line."""
        self._rest += self._decoder.decode(data, final)
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            visible = _visible(line)
            for start in range(0, max(1, len(visible)), MAX_LINE_LENGTH):
                yield visible[start : start + MAX_LINE_LENGTH]
        if "\r" in self._rest:
            shown = _visible(self._rest)[:MAX_LINE_LENGTH]
            self.status = shown[:MAX_STATUS_LENGTH]
            # If the cursor is at the start of the line, further text overwrites the status.
            self._rest = "\r" + shown + ("\r" if self._rest.endswith("\r") else "")
        else:
            if lines:
                self.status = ""
            while len(self._rest) > MAX_LINE_LENGTH:
                yield self._rest[:MAX_LINE_LENGTH]
                self._rest = self._rest[MAX_LINE_LENGTH:]
        if final:
            rest, self._rest, self.status = _visible(self._rest), "", ""
            if rest:
                yield rest


def _visible(line: str) -> str:
    """Return the visible part of a line: the text after the last carriage return."""
    return line.rstrip("\r").rpartition("\r")[2].replace(_ERASE, "")


class OutputRelay:
    """Relays the output of one program."""

    def __init__(self, selector: selectors.BaseSelector, launcher: LauncherLink) -> None:
        self._selector = selector
        self._launcher = launcher
        self._splitters: dict[Any, tuple[str, LineSplitter]] = {}
        self._is_paused = False
        self._file: BackgroundWriter | None = None
        self._file_error: OSError | None = None
        self._reported_error = False

    def open_file(self, rank: int, environ: Mapping[str, str]) -> None:
        """Open this rank's output file, if ``environ`` names a folder for output files.

        Raises:
            OSError: If the file can't be opened.
        """
        if folder := environ.get(OUTPUT_DIR):
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Keep the output of earlier attempts.
            again = environ.get(ATTEMPT, "1") != "1" or "SLURM_RESTART_COUNT" in environ
            mode = os.O_APPEND if again else os.O_TRUNC
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode
            descriptor = os.open(Path(folder, f"rank-{rank}.log"), flags, 0o666)
            self._file = BackgroundWriter(descriptor, gap=_gap, fails=self._note_error)

    @property
    def is_open(self) -> bool:
        """Whether the program can still write output."""
        return bool(self._splitters)

    def listen(self, program: subprocess.Popen[bytes]) -> None:
        """Start to read the output of ``program`` whenever it writes."""
        for name in ("stdout", "stderr"):
            pipe = getattr(program, name)
            os.set_blocking(pipe.fileno(), False)
            self._splitters[pipe] = (name, LineSplitter())
            self._selector.register(pipe, selectors.EVENT_READ, self._read)

    def update_pause(self) -> None:
        """Pause the program while the launcher or the disk is slow. Call this regularly."""
        if self._file_error is not None and not self._reported_error:
            self._reported_error = True
            text = f"hvdtrain run: writing to --output-dir failed: {self._file_error}; retrying"
            self._launcher.send("line", stream="stderr", text=text)
        file_is_slow = self._file is not None and self._file.should_pause
        self._pause(self._launcher.is_full or file_is_slow)

    def resume(self) -> None:
        """Read output immediately from now on, even if the launcher or the disk is slow."""
        self._pause(False)

    def finish(self) -> None:
        """Relay the output left in the pipes, after all processes that write there have ended."""
        for pipe, (name, splitter) in list(self._splitters.items()):
            for _ in range(_MAX_READS):
                if pipe not in self._splitters or not self._read(pipe):
                    break
            for line in splitter.feed(b"", final=True):
                self.relay_line(name, line)
        if self._file is not None:
            self._file.close(DISK_PATIENCE_S)

    def relay_line(self, name: str, line: str) -> None:
        """Relay a line of stdout or stderr."""
        # Write to the file first, so that the file is complete even if the launcher is gone.
        if self._file is not None:
            self._file.write(f"{line}\n".encode())
        self._launcher.send("line", stream=name, text=line)

    def _pause(self, pause: bool) -> None:
        if pause == self._is_paused:
            return
        self._is_paused = pause
        for pipe in self._splitters:
            if pause:
                self._selector.unregister(pipe)
            else:
                self._selector.register(pipe, selectors.EVENT_READ, self._read)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Relay the content of a pipe, and return whether the pipe contained anything."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        name, splitter = self._splitters[pipe]
        before = splitter.status
        for line in splitter.feed(data, final=not data):
            self.relay_line(name, line)
        if splitter.status != before:
            self._launcher.send("status", text=splitter.status)
        if not data:
            if not self._is_paused:
                self._selector.unregister(pipe)
            del self._splitters[pipe]
        return bool(data)

    def _note_error(self, error: OSError) -> bool:
        self._file_error = error
        return True


def _gap(dropped: int) -> bytes:
    return f"hvdtrain run: {plural(dropped, 'line')} could not be written here\n".encode()
