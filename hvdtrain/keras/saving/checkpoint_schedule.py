"""When a checkpoint is taken: what a user asked for, steps and seconds, and signals.

Ranks agree on steps but not on seconds: the chief's clock decides, and a signal may reach any rank.
So the ranks synchronize, but not after every step: the chief sets the number of steps until the
next time, so that about ``LOOK_S`` pass.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hvdtrain.errors import ConfigurationError

__all__ = ["LOOK_S", "CheckpointOptions", "CheckpointSchedule", "PreemptionSignals"]

# A signal waits this long at most, and a step; synchronizing takes about a ten-thousandth of it.
LOOK_S = 0.5
MOST_STEPS = 10_000

_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Mere warnings that time is nearly over; they may come again.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The arguments of ``hvdtrain.Checkpoint``, checked.

    Raises:
        ConfigurationError: One of them can't be used.
    """

    directory: str
    every_steps: int | None
    every_s: float | None
    keep: int
    export: str | None
    on_error: str

    def __post_init__(self) -> None:
        whole = "a whole number above 0"
        for name, usable, expected in (
            ("every_steps", self.every_steps is None or _is_count(self.every_steps), whole),
            ("every_s", self.every_s is None or self.every_s > 0, "seconds, more than 0"),
            ("keep", _is_count(self.keep), whole),
            (
                "export",
                self.export is None or self.export.endswith(".keras"),
                "a path that ends in .keras",
            ),
            ("on_error", self.on_error in ("warn", "raise"), '"warn" or "raise"'),
        ):
            if not usable:
                raise ConfigurationError(
                    f"Checkpoint({name}={getattr(self, name)!r}): expected {expected}."
                )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0


class CheckpointSchedule:
    """Decides from steps and seconds, each of which may be None."""

    def __init__(self, every_steps: int | None, every_s: float | None) -> None:
        self.every_steps = every_steps
        self.every_s = every_s
        self._next_look = 0
        self.begin(0, 0.0)

    def begin(self, step: int, now_s: float, *, overdue: bool = False) -> None:
        """Start counting, for the chief.

        Args:
            step: The step after which training begins, or another rank becomes the chief.
            now_s: The current time.
            overdue: Whether to take a checkpoint as soon as possible.
        """
        self._met_step, self._met_s = step, now_s  # when the ranks last met
        self._taken_s = now_s  # when a checkpoint was last taken
        self._overdue = overdue

    @property
    def every_epoch(self) -> bool:
        """Whether one is taken at the end of every epoch, which is the default."""
        return self.every_steps is None and self.every_s is None

    def is_due(self, step: int, before: int) -> bool:
        """Whether steps ``before`` + 1 to ``step`` hold one after which a checkpoint is taken."""
        every = self.every_steps
        return every is not None and step // every > before // every

    def meets(self, step: int, before: int) -> bool:
        """Whether the ranks synchronize after ``step``; the same on all of them."""
        return step >= self._next_look or self.is_due(step, before)

    def look_again(self, step: int) -> None:
        """Note the step after which the ranks synchronize next, as the chief set it."""
        self._next_look = step

    def is_overdue(self, now_s: float, *, due: bool) -> bool:
        """Whether a checkpoint has been due since the last one was taken; for the chief.

        ``due`` is whether the step just done makes it due.
        """
        late = self.every_s is not None and now_s - self._taken_s >= self.every_s
        self._overdue = self._overdue or due or late
        return self._overdue

    def steps_ahead(self, step: int, now_s: float) -> int:
        """Return the steps until ranks synchronize again, at the pace since the last time.

        For the chief, each time that the ranks synchronize.
        """
        step_s = (now_s - self._met_s) / max(1, step - self._met_step)
        self._met_step, self._met_s = step, now_s
        look_s = LOOK_S
        if self.every_s is not None:
            look_s = min(look_s, max(self.every_s - (now_s - self._taken_s), 0.0))
        return int(min(max(look_s / max(step_s, 1e-6), 1), MOST_STEPS))

    def note_taken(self, now_s: float) -> None:
        """Note that a checkpoint was taken; on the chief."""
        self._taken_s = now_s
        self._overdue = False


class PreemptionSignals:
    """Records signals from ``catch`` to ``release``, so that a step can be finished and saved.

    Only the main thread may change what a signal does; in another one nothing is caught.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.received = 0
        """The number of the first signal received, or 0."""

    def catch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _CAUGHT}

    def release(self, *, handled: bool) -> None:
        """Restore the former handlers, and deliver a signal that was received but not handled.

        After a handled one the program is about to end: a second warning, as when both Slurm and
        the launcher send one, must not kill it before it has reported its end.
        """
        for number, previous in self._previous.items():
            after = signal.SIG_DFL if previous is None else previous
            is_over = handled and number in _WARNINGS and after == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if is_over else after)
        self._previous = {}
        if self.received and not handled:
            os.kill(os.getpid(), self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
