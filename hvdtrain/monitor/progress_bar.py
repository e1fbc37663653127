"""The progress bar of an epoch, on the last line of a terminal."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdtrain.config import COLUMNS, LAUNCHER

__all__ = ["EpochProgress", "Pace", "StatusLine", "draw", "terminal_columns"]

_WIDEST, _NARROWEST = 30, 8
# By how much what was measured counts less after each measurement.
_DECAY = 0.95
_ERASE = "\r\x1b[K"

# Names of the processes between a rank and its user, as Linux cuts them (15 characters).
_LAUNCHERS = {
    *("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted"),
    *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr"),
}


@dataclass(frozen=True, kw_only=True)
class EpochProgress:
    """The progress of an epoch.

    Attributes:
        epoch: From 1.
        epochs: How many there are.
        done: Steps.
        steps: How many there are; 0 for nobody knows.
        loss: The mean loss of this epoch so far; nan for none.
        rate: Samples a second; 0 for not known.
        step_s: Seconds for one step; 0 for not known.
    """

    epoch: int
    epochs: int
    done: int
    steps: int
    loss: float
    rate: float
    step_s: float


class Pace:
    """The speed of training, by the last steps above all.

    The first measurement of all counts until there is another one: it compiles.
    """

    def __init__(self) -> None:
        self._measured = 0
        self._steps = self._samples = self._seconds = 0.0

    def add(self, steps: int, samples: float, seconds: float) -> None:
        """Note that so many ``steps`` of ``samples`` in all took ``seconds``."""
        decay = 0.0 if self._measured == 1 else _DECAY
        self._measured += 1
        self._steps = decay * self._steps + steps
        self._samples = decay * self._samples + samples
        self._seconds = decay * self._seconds + seconds

    @property
    def rate(self) -> float:
        """Samples a second; 0 for not known."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Seconds for one step; 0 for not known."""
        return self._seconds / self._steps if self._steps > 0 else 0.0


def draw(progress: EpochProgress, columns: int) -> str:
    """Draw ``progress`` in less than ``columns`` characters; the least important goes first."""
    head = f"epoch {progress.epoch}/{progress.epochs}"
    count = f"{progress.done}/{progress.steps}" if progress.steps else f"step {progress.done}"
    words = _words(progress)
    while words and len(" ".join([head, count, ", ".join(words)])) >= columns:
        words.pop()
    rest = " ".join(filter(None, [count, ", ".join(words)]))
    room = min(_WIDEST, columns - 1 - len(f"{head} [] {rest}"))
    if not progress.steps or room < _NARROWEST:
        return f"{head} {rest}"[: columns - 1]
    filled = min(room, room * progress.done // progress.steps)
    return f"{head} [{'=' * filled}{'.' * (room - filled)}] {rest}"


def _words(progress: EpochProgress) -> list[str]:
    """Return what there is to say, the most important first."""
    words = []
    if not math.isnan(progress.loss):
        words.append(f"loss = {progress.loss:.2f}")
    left_s = (progress.steps - progress.done) * progress.step_s
    if left_s > 0:
        words.append(f"ETA {_duration(left_s)}")
    if progress.rate > 0:
        words.append(f"{progress.rate:.0f} samples/s")
    return words


def _duration(seconds: float) -> str:
    """Write a duration as 59 s, 4:07 min or 1:02:03 h."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


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
