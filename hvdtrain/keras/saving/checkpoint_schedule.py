"""When ranks meet to decide about a checkpoint, and when one is due; no clock and no ranks here.

Steps are counted alike on all ranks, seconds are not: the chief's clock decides, and a signal may
reach any rank. So the ranks exchange a word, but not after every step: the chief says after how
many steps the next time is, so that it comes to about ``LOOK_S``.
"""

from __future__ import annotations

from hvdtrain.errors import ConfigurationError

__all__ = ["LOOK_S", "CheckpointSchedule"]

# A signal waits no longer than that and a step; an exchange takes about a ten-thousandth of it.
LOOK_S = 0.5
MOST_STEPS = 10_000


class CheckpointSchedule:
    """Decides from steps and seconds.

    Args:
        every_steps: A checkpoint after so many steps; None for none.
        every_s: A checkpoint after so many seconds; None for none.

    Raises:
        ConfigurationError: They are not above 0.
    """

    def __init__(self, every_steps: int | None, every_s: float | None) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise ConfigurationError(
                f"Checkpoint(every_steps={every_steps!r}): expected a whole number above 0."
            )
        if every_s is not None and not every_s > 0:
            raise ConfigurationError(
                f"Checkpoint(every_s={every_s!r}): expected seconds, more than 0."
            )
        self.every_steps = every_steps
        self.every_s = every_s
        self._next_look = 0

    @property
    def every_epoch(self) -> bool:
        """Whether one is taken at the end of every epoch, as nothing else was asked for."""
        return self.every_steps is None and self.every_s is None

    def is_due(self, step: int, before: int) -> bool:
        """Whether steps ``before`` + 1 to ``step`` hold one after which a checkpoint is taken."""
        every = self.every_steps
        return every is not None and step // every > before // every

    def is_late(self, since_s: float) -> bool:
        """Whether it is ``every_s`` since the last one was taken; for the chief."""
        return self.every_s is not None and since_s >= self.every_s

    def meets(self, step: int, before: int) -> bool:
        """Whether the ranks exchange a word after ``step``; alike on all of them."""
        return step >= self._next_look or self.is_due(step, before)

    def steps_ahead(self, step_s: float, since_s: float) -> int:
        """After how many steps of ``step_s`` seconds to meet again; for the chief."""
        look_s = LOOK_S
        if self.every_s is not None:
            look_s = min(look_s, max(self.every_s - since_s, 0.0))
        return int(min(max(look_s / max(step_s, 1e-6), 1), MOST_STEPS))

    def look_again(self, step: int) -> None:
        """Note after which step the ranks meet next, as the chief said."""
        self._next_look = step
