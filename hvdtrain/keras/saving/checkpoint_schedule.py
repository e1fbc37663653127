"""When a checkpoint is taken: what a user asked for, steps and seconds, and signals.

Steps are counted alike on all ranks, seconds are not: the chief's clock decides, and a signal may
reach any rank. So the ranks exchange a word, but not after every step: the chief says after how
many steps the next time is, so that it comes to about ``LOOK_S``.
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

# A signal waits no longer than that and a step; an exchange takes about a ten-thousandth of it.
LOOK_S = 0.5
MOST_STEPS = 10_000

_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# What says no more than that time is nearly over, and may say so again.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The arguments of ``hvdtrain.Checkpoint``, which says what they mean.

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
    """Decides from steps and seconds; None where they are not to matter."""

    def __init__(self, every_steps: int | None, every_s: float | None) -> None:
        self.every_steps = every_steps
        self.every_s = every_s
        self._next_look = 0
        self.begin(0, 0.0)

    def begin(self, step: int, now_s: float, *, overdue: bool = False) -> None:
        """Count on the chief's behalf from here on.

        Args:
            step: The step after which training begins, or another rank becomes the chief.
            now_s: The time at which it does.
            overdue: Whether a checkpoint is to be taken as soon as possible.
        """
        self._met_step, self._met_s = step, now_s  # when the ranks last met
        self._taken_s = now_s  # when a checkpoint was last taken
        self._overdue = overdue

    @property
    def every_epoch(self) -> bool:
        """Whether one is taken at the end of every epoch, as nothing else was asked for."""
        return self.every_steps is None and self.every_s is None

    def is_due(self, step: int, before: int) -> bool:
        """Whether steps ``before`` + 1 to ``step`` hold one after which a checkpoint is taken."""
        every = self.every_steps
        return every is not None and step // every > before // every

    def meets(self, step: int, before: int) -> bool:
        """Whether the ranks exchange a word after ``step``; alike on all of them."""
        return step >= self._next_look or self.is_due(step, before)

    def look_again(self, step: int) -> None:
        """Note after which step the ranks meet next, as the chief said."""
        self._next_look = step

    def is_overdue(self, now_s: float, *, due: bool) -> bool:
        """Whether a checkpoint has been due since the last one was taken; for the chief.

        ``due`` is whether the step just done makes it due.
        """
        late = self.every_s is not None and now_s - self._taken_s >= self.every_s
        self._overdue = self._overdue or due or late
        return self._overdue

    def steps_ahead(self, step: int, now_s: float) -> int:
        """Return after how many steps to meet again, as fast as those since the last time were.

        For the chief, each time that the ranks meet.
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
    """Notes such signals from ``catch`` to ``release``, so that a step can be finished and saved.

    Only the main thread may change what a signal does; in another one nothing is caught.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.received = 0
        """The first that came, as a number; 0 for none."""

    def catch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _CAUGHT}

    def release(self, *, handled: bool) -> None:
        """Let signals do what they did before; one that came and was not handled does it now.

        Where it was handled the program is about to end. Another warning, which comes by several
        ways where Slurm and a launcher both tell, must not kill it before it has said how.
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
