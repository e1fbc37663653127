"""The schedule of checkpoints: after a number of steps or seconds, and after signals.

All ranks count the same steps. But only the chief's clock decides whether enough seconds have
passed, and a signal may reach any rank. The ranks therefore synchronize from time to time, but not
after every step. Each time, the chief chooses the number of steps until the next synchronization,
so that these steps take about ``LOOK_S`` seconds.
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

# Seconds between synchronizations. A signal takes effect after at most this time plus one step.
# Synchronizing takes about 0.01 % of the time.
LOOK_S = 0.5
MOST_STEPS = 10_000

_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Signals that warn before the job's time limit. They may be sent more than once.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The validated arguments of ``hvdtrain.Checkpoint``. Its docstring describes them.

    Raises:
        ConfigurationError: If an argument is not valid.
    """

    directory: str
    every_steps: int | None
    every_s: float | None
    keep: int
    export: str | None
    on_error: str

    def __post_init__(self) -> None:
        count = "a positive integer"
        for name, valid, expected in (
            ("every_steps", self.every_steps is None or _is_count(self.every_steps), count),
            ("every_s", self.every_s is None or self.every_s > 0, "a positive number of seconds"),
            ("keep", _is_count(self.keep), count),
            ("export", self.export is None or self.export.endswith(".keras"), "a .keras path"),
            ("on_error", self.on_error in ("warn", "raise"), '"warn" or "raise"'),
        ):
            if not valid:
                raise ConfigurationError(
                    f"{name} of Checkpoint must be {expected}, got {getattr(self, name)!r}."
                )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0


class CheckpointSchedule:
    """Decides when the ranks synchronize and when they take a checkpoint."""

    def __init__(self, every_steps: int | None, every_s: float | None) -> None:
        self.every_steps = every_steps
        self.every_s = every_s
        self.next_look = 0
        """The step after which the ranks synchronize next."""
        self.begin(0, 0.0)

    def begin(self, step: int, now_s: float, *, overdue: bool = False) -> None:
        """Start counting steps and seconds. Only the chief uses these counts.

        Args:
            step: The last step before training begins, or before this rank becomes the chief.
            now_s: The current time.
            overdue: Whether to take a checkpoint as soon as possible.
        """
        self._synchronized_step, self._synchronized_s = step, now_s
        self._taken_s = now_s
        self._overdue = overdue

    @property
    def every_epoch(self) -> bool:
        """Whether to take a checkpoint at the end of every epoch. This is the default."""
        return self.every_steps is None and self.every_s is None

    def is_due(self, step: int, before: int) -> bool:
        """Return whether a checkpoint is due after ``step`` because of ``every_steps``.

        The result is also true if the checkpoint became due at an earlier step that comes after
        ``before``. For example, with ``every_steps=10`` a checkpoint becomes due at step 20. The
        result for ``step=21`` and ``before=18`` is therefore true.
        """
        every = self.every_steps
        return every is not None and step // every > before // every

    def synchronizes(self, step: int, before: int) -> bool:
        """Return whether the ranks synchronize after ``step``. All ranks get the same answer."""
        return step >= self.next_look or self.is_due(step, before)

    def is_overdue(self, now_s: float, *, due: bool) -> bool:
        """Return whether a checkpoint is due, but not taken yet. Only the chief calls this."""
        late = self.every_s is not None and now_s - self._taken_s >= self.every_s
        self._overdue = self._overdue or due or late
        return self._overdue

    def steps_ahead(self, step: int, now_s: float) -> int:
        """Return the number of steps until the next synchronization. Only the chief calls this.

        The chief assumes that the next steps take as long as the latest steps. It chooses a number
        of steps that takes about ``LOOK_S`` seconds, or fewer if the next checkpoint is due
        earlier.
        """
        step_s = (now_s - self._synchronized_s) / max(1, step - self._synchronized_step)
        self._synchronized_step, self._synchronized_s = step, now_s
        look_s = LOOK_S
        if self.every_s is not None:
            look_s = min(look_s, max(self.every_s - (now_s - self._taken_s), 0.0))
        return int(min(max(look_s / max(step_s, 1e-6), 1), MOST_STEPS))

    def note_taken(self, now_s: float) -> None:
        """Record that a checkpoint was taken. Only the chief calls this."""
        self._taken_s = now_s
        self._overdue = False


class PreemptionSignals:
    """Records signals instead of ending the process, so that a step can end and be saved.

    Signals are recorded between ``catch`` and ``release``. Python allows only the main thread to
    set signal handlers, so nothing is recorded if another thread calls ``catch``.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.received = 0
        """The number of the first signal received; 0 before that."""
        self.replace_default = False
        """Whether SIGTERM would end the process if it were not caught."""

    def catch(self) -> None:
        """Replace the signal handlers by handlers that record signals."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _CAUGHT}
            self.replace_default = self._previous[signal.SIGTERM] == signal.SIG_DFL

    def release(self, *, handled: bool) -> None:
        """Restore the signal handlers. If a recorded signal was not handled, send it again.

        If the signal was handled, the program is about to exit. Slurm and the launcher may both
        send a signal, so a second SIGUSR1 or SIGUSR2 may follow. It must not kill the program
        before the program has reported its exit.
        """
        for number, previous in self._previous.items():
            after = signal.SIG_DFL if previous is None else previous
            ignore = handled and number in _WARNINGS and after == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if ignore else after)
        self._previous = {}
        if self.received and not handled:
            os.kill(os.getpid(), self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
