"""The output of a rank's program, on its way to the launcher and into a file."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain.agent.agent_environment import ATTEMPT, OUTPUT_DIR
from hvdtrain.agent.output_lines import LineSplitter

__all__ = ["OutputRelay"]


class OutputRelay:
    """The output of one program; ``send`` tells the launcher a message of some kind."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[..., None]) -> None:
        self._selector = selector
        self._send = send
        self._splitters: dict[Any, tuple[str, LineSplitter]] = {}
        self._log: IO[str] | None = None

    def keep(self, rank: int, environ: Mapping[str, str]) -> None:
        """Write it into a file as well, where one is asked for.

        Raises:
            OSError: The file can't be written.
        """
        if folder := environ.get(OUTPUT_DIR):
            Path(folder).mkdir(parents=True, exist_ok=True)
            # What an attempt before this one wrote is kept.
            again = environ.get(ATTEMPT, "1") != "1" or "SLURM_RESTART_COUNT" in environ
            path = Path(folder, f"rank-{rank}.log")
            self._log = path.open("a" if again else "w", encoding="utf-8", buffering=1)

    @property
    def goes_on(self) -> bool:
        """Whether more may come."""
        return bool(self._splitters)

    def listen(self, program: subprocess.Popen[bytes]) -> None:
        """Take in what ``program`` writes, whenever there is something."""
        for name in ("stdout", "stderr"):
            pipe = getattr(program, name)
            os.set_blocking(pipe.fileno(), False)
            self._splitters[pipe] = (name, LineSplitter())
            self._selector.register(pipe, selectors.EVENT_READ, self._read)

    def pass_on(self, name: str, line: str) -> None:
        """One line of stdout or stderr."""
        # The file first: what the launcher shows is on disk.
        if self._log is not None:
            try:
                self._log.write(line + "\n")
            except OSError as error:
                self._log = None
                self._send("line", stream="stderr", text=f"hvdtrain run: no log: {error}")
        self._send("line", stream=name, text=line)

    def _read(self, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        name, splitter = self._splitters[pipe]
        before = splitter.status
        for line in splitter.feed(data, final=not data):
            self.pass_on(name, line)
        if splitter.status != before:
            self._send("status", text=splitter.status)
        if not data:
            self._selector.unregister(pipe)
            del self._splitters[pipe]
