"""Looks for signals while ``fit`` validates, which may take longer than whoever sent them waits."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from hvdtrain.collectives.interface import Collectives
from hvdtrain.keras.saving.checkpoint_schedule import CheckpointSchedule

__all__ = ["SignalPoll"]


class SignalPoll:
    """One validation, which begins after the last step of an epoch.

    Attributes:
        own: What this rank had of its own when it began.
    """

    def __init__(self, own: Mapping[str, np.ndarray]) -> None:
        self.own = own
        self._schedule = CheckpointSchedule(None, None)
        self._steps = 0
        self._begun_s = time.monotonic()

    def look(self, received: int, collectives: Collectives) -> int:
        """Call after each step; collective.

        Args:
            received: A signal that has come to this rank, or 0.
            collectives: The engine.

        Returns:
            A signal that has come to some rank, or 0; alike on all of them.
        """
        self._steps += 1
        if not self._schedule.meets(self._steps, self._steps):
            return 0
        step_s = (time.monotonic() - self._begun_s) / self._steps
        # The chief's clock decides, as everywhere: the others pass 0.
        ahead = self._schedule.steps_ahead(step_s, 0.0) if collectives.rank == 0 else 0
        word = np.array([received, ahead])
        number, ahead = collectives.allreduce(word, "max", name="whether to end")
        self._schedule.look_again(self._steps + int(ahead))
        return int(number)
