"""The progress bar of an epoch on the last line of a terminal.

Keras' ``Progbar`` is not used, because it can't print lines above the bar and does not find the
terminal behind mpirun.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import TextIO

from hvdtrain.config import COLUMNS, LAUNCHER
from hvdtrain.text import format_duration

__all__ = ["StatusLine", "TrainingSpeed", "format_progress", "terminal_columns"]

_WIDEST, _NARROWEST = 30, 8
# Each new measurement reduces the weight of all older ones by this factor.
_DECAY = 0.95
_ERASE = "\r\x1b[K"

# Names of the processes between a rank and its user, truncated to 15 characters by Linux.
_LAUNCHERS = {
    *("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted"),
    *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr"),
}


class TrainingSpeed:
    """An exponential moving average of the training speed.

    The second measurement replaces the first one, which includes compilation.

    Attributes:
        samples_per_s: Samples per second; 0 if unknown.
        step_s: Seconds per step; 0 if unknown.
    """

    def __init__(self) -> None:
        self._count = 0
        self._steps = self._samples = self._seconds = 0.0
        self.samples_per_s = self.step_s = 0.0

    def add(self, steps: int, samples: float, seconds: float) -> None:
        """Add a measurement: ``steps`` with ``samples`` in total took ``seconds``."""
        decay = 0.0 if self._count == 1 else _DECAY
        self._count += 1
        self._steps = decay * self._steps + steps
        self._samples = decay * self._samples + samples
        self._seconds = decay * self._seconds + seconds
        self.samples_per_s = self._samples / self._seconds if self._seconds > 0 else 0.0
        self.step_s = self._seconds / self._steps if self._steps > 0 else 0.0


def format_progress(
    columns: int,
    *,
    epoch: int,
    epochs: int,
    done: int,
    steps: int,
    loss: float,
    samples_per_s: float,
    step_s: float,
) -> str:
    """Format a progress bar in less than ``columns`` characters.

    If space is short, less important parts are left out.

    Args:
        columns: The width of the terminal.
        epoch: The epoch, from 1.
        epochs: The number of epochs.
        done: Completed steps of the epoch.
        steps: Steps of the epoch; 0 if unknown.
        loss: The mean loss of the epoch; NaN if unknown.
        samples_per_s: Samples per second; 0 if unknown.
        step_s: Seconds per step; 0 if unknown.
    """
    head = f"epoch {epoch}/{epochs}"
    count = f"{done}/{steps}" if steps else f"step {done}"
    details = [] if math.isnan(loss) else [f"loss = {loss:.2f}"]
    if (left_s := (steps - done) * step_s) > 0:
        details.append(f"ETA {format_duration(math.ceil(left_s))}")
    if samples_per_s > 0:
        details.append(f"{samples_per_s:.0f} samples/s")
    while details and len(" ".join([head, count, ", ".join(details)])) >= columns:
        details.pop()
    rest = " ".join(filter(None, [count, ", ".join(details)]))
    room = min(_WIDEST, columns - 1 - len(f"{head} [] {rest}"))
    if not steps or room < _NARROWEST:
        return f"{head} {rest}"[: columns - 1]
    filled = min(room, room * done // steps)
    return f"{head} [{'=' * filled}{'.' * (room - filled)}] {rest}"


def terminal_columns(stream: TextIO) -> int:
    """Return the width of the terminal that shows ``stream``; 0 if lines can't be erased there.

    ``hvdtrain run`` passes the width in an environment variable. With other launchers, a rank's own
    output is not connected to the user's terminal: Open MPI gives ranks a pseudo-terminal without a
    size, and Hydra gives them a pipe. Both forward the text to mpirun's output, so mpirun's output
    is checked if mpirun runs on this host.
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
    """Return the terminal width of the mpirun that started this process; 0 without a terminal."""
    top, parent = 0, os.getppid()
    while parent > 1:
        # "pid (name) state parent ..."; the name may contain any character.
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
    """Prints lines above a status that stays on the last line.

    Args:
        stream: The output.
        columns: The width of the terminal. With 0, the output is not a terminal, and the status is
            not shown.
    """

    def __init__(self, stream: TextIO, columns: int) -> None:
        self._stream = stream
        self.columns = columns
        self._status = ""

    def print(self, line: str) -> None:
        """Print a line above the status."""
        erase = _ERASE if self.columns else ""
        self._write(f"{erase}{line}\n{self._status}")

    def show(self, status: str) -> None:
        """Replace the status. It is truncated because a wrapped line can't be erased."""
        if self.columns:
            self._status = status[: self.columns - 1]
            self._write(_ERASE + self._status)

    def clear(self) -> None:
        """Remove the status."""
        if self._status:
            self._status = ""
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
