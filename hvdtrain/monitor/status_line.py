"""Lines on an output whose last line may be a changing status, where the output is a terminal."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TextIO

from hvdtrain.config import COLUMNS, LAUNCHER

__all__ = ["StatusLine", "terminal_columns"]

_ERASE = "\r\x1b[K"

# Names of the processes between a rank and its user, as Linux cuts them (15 characters).
_LAUNCHERS = {
    *("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted"),
    *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr"),
}


def terminal_columns(stream: TextIO) -> int:
    """The width of the terminal that shows ``stream``; 0 for none that a line can be erased on.

    A rank can't ask its own output alone: Open MPI gives every rank a pseudo-terminal without a
    size, whatever mpirun's own output is, and Hydra a pipe. What they are given comes out at
    mpirun's output, so that one decides where mpirun runs on this host. ``hvdtrain run`` says by
    itself what its output is.
    """
    if LAUNCHER in os.environ:
        return int(os.environ.get(COLUMNS, "0"))
    if os.environ.get("TERM") == "dumb":
        return 0
    try:
        number = stream.fileno()
        if os.isatty(number):
            return os.get_terminal_size(number).columns or _launcher_columns()
        return _launcher_columns() if stat.S_ISFIFO(os.fstat(number).st_mode) else 0
    except (OSError, ValueError):
        return 0


def _launcher_columns() -> int:
    """The width of the terminal that the mpirun above this process prints to; 0 for none."""
    top, parent = 0, os.getppid()
    while parent > 1:
        # "pid (name) state parent …"; the name may hold anything.
        head, _, tail = Path(f"/proc/{parent}/stat").read_text().rpartition(")")
        if head.partition("(")[2] not in _LAUNCHERS:
            break
        top, parent = parent, int(tail.split()[1])
    if not top:
        return 0
    number = os.open(f"/proc/{top}/fd/1", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return os.get_terminal_size(number).columns if os.isatty(number) else 0
    finally:
        os.close(number)


class StatusLine:
    """Prints lines above a status that stays the last line.

    Args:
        stream: Where to print.
        columns: The terminal's width; 0 for no terminal, where no status is shown.

    Attributes:
        columns: The same.
    """

    def __init__(self, stream: TextIO, columns: int) -> None:
        self._stream = stream
        self.columns = columns
        self._status = ""

    def print(self, line: str) -> None:
        """Print ``line`` for good; whatever stands in the last line goes, if it can be redrawn."""
        erase = _ERASE if self.columns else ""
        self._write(f"{erase}{line}\n{self._status}")

    def show(self, status: str) -> None:
        """Make ``status`` the last line; too long a one is cut, because it could not be erased."""
        if self.columns:
            self._status = status[: self.columns - 1]
            self._write(_ERASE + self._status)

    def clear(self) -> None:
        """Take the status away."""
        if self._status:
            self._status = ""
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
