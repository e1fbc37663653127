"""The schedule of checkpoints: when ranks meet to decide, when one is due; no clock, no ranks.

Steps are counted alike on all ranks, seconds are not: the chief's clock decides, and a signal may
reach any rank. So the ranks exchange a word, but not after every step: the chief says after how
many steps the next time is, so that it comes to about ``LOOK_S``.
"""

from __future__ import annotations

__all__ = ["LOOK_S", "CheckpointSchedule"]

# A signal waits no longer than that and a step; an exchange takes about a ten-thousandth of it.
LOOK_S = 0.5
MOST_STEPS = 10_000


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
