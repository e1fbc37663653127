"""The output of a rank's program, on its way to the launcher and into a file."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain.agent.backlog import BackgroundWriter
from hvdtrain.agent.messages import ATTEMPT, OUTPUT_DIR, LauncherLink
from hvdtrain.agent.output_lines import LineSplitter
from hvdtrain.text import plural

__all__ = ["OutputRelay"]

# How long the end of a rank may wait for a disk that takes nothing.
DISK_PATIENCE_S = 10.0
# More than a pipe holds.
_MOST_READS = 100


class OutputRelay:
    """The output of one program; ``launcher`` gets every line."""

    def __init__(self, selector: selectors.BaseSelector, launcher: LauncherLink) -> None:
        self._selector = selector
        self._launcher = launcher
        self._splitters: dict[Any, tuple[str, LineSplitter]] = {}
        self._is_paused = False
        self._log: BackgroundWriter | None = None
        self._log_error: OSError | None = None
        self._told_error = False

    def keep(self, rank: int, environ: Mapping[str, str]) -> None:
        """Write it into a file as well, where one is asked for.

        Raises:
            OSError: The file can't be opened.
        """
        if folder := environ.get(OUTPUT_DIR):
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Keep the output of earlier attempts.
            again = environ.get(ATTEMPT, "1") != "1" or "SLURM_RESTART_COUNT" in environ
            kept = os.O_APPEND if again else os.O_TRUNC
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | kept
            descriptor = os.open(Path(folder, f"rank-{rank}.log"), flags, 0o666)
            self._log = BackgroundWriter(descriptor, gap=_gap, fails=self._note_error)

    @property
    def goes_on(self) -> bool:
        """Whether there may be more output."""
        return bool(self._splitters)

    def listen(self, program: subprocess.Popen[bytes]) -> None:
        """Read the output of ``program`` whenever there is some."""
        for name in ("stdout", "stderr"):
            pipe = getattr(program, name)
            os.set_blocking(pipe.fileno(), False)
            self._splitters[pipe] = (name, LineSplitter())
            self._selector.register(pipe, selectors.EVENT_READ, self._read)

    def review(self) -> None:
        """Pause the program while the launcher or the disk is slow; call this often."""
        if self._log_error is not None and not self._told_error:
            self._told_error = True
            text = f"hvdtrain run: --output-dir can't be written: {self._log_error}; trying again"
            self._launcher.send("line", stream="stderr", text=text)
        self._pause(self._launcher.is_full or (self._log is not None and self._log.holds_up))

    def finish(self) -> None:
        """Pass on the rest of the pipes after all their writers have ended."""
        for pipe, (name, splitter) in list(self._splitters.items()):
            for _ in range(_MOST_READS):
                if pipe not in self._splitters or not self._read(pipe):
                    break
            for line in splitter.feed(b"", final=True):
                self.pass_on(name, line)
        if self._log is not None:
            self._log.close(DISK_PATIENCE_S)

    def resume(self) -> None:
        """Read from now on at once, even if the launcher or the disk is slow."""
        self._pause(False)

    def pass_on(self, name: str, line: str) -> None:
        """One line of stdout or stderr."""
        # The file first: it is complete where the launcher is not told everything any more.
        if self._log is not None:
            self._log.write(f"{line}\n".encode())
        self._launcher.send("line", stream=name, text=line)

    def _pause(self, pauses: bool) -> None:
        if pauses == self._is_paused:
            return
        self._is_paused = pauses
        for pipe in self._splitters:
            if pauses:
                self._selector.unregister(pipe)
            else:
                self._selector.register(pipe, selectors.EVENT_READ, self._read)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Pass on the content of a pipe; return whether there was any."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        name, splitter = self._splitters[pipe]
        before = splitter.status
        for line in splitter.feed(data, final=not data):
            self.pass_on(name, line)
        if splitter.status != before:
            self._launcher.send("status", text=splitter.status)
        if not data:
            if not self._is_paused:
                self._selector.unregister(pipe)
            del self._splitters[pipe]
        return bool(data)

    def _note_error(self, error: OSError) -> bool:
        self._log_error = error
        return True


def _gap(dropped: int) -> bytes:
    return f"hvdtrain run: {plural(dropped, 'line')} could not be written here\n".encode()
