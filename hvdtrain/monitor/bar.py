"""One line that tells how far an epoch is, as wide as there is room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["EpochProgress", "Pace", "draw"]

_WIDEST, _NARROWEST = 30, 8
# By how much what was measured counts less after each measurement.
_DECAY = 0.95


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
