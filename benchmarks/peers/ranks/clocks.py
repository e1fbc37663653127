"""What every training notes of itself, whatever the framework."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from hvdtrain.bench.machine import peak_resident_bytes

__all__ = ["StepClock", "figures_of"]


class StepClock:
    """Notes when the first step has ended; kills a rank after some, where that is measured.

    Args:
        rank: This one.
        job: With ``die``, where a rank is to die: ``rank``, ``after_step``, and the ``file`` that
            tells the processes which come after it that it did, and when.
    """

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        die = job.get("die")
        self._killed = Path(die["file"]) if die else None
        self._after = die["after_step"] if die and rank == die["rank"] else 0
        self._again = self._killed is not None and self._killed.exists()
        self._steps = 0
        self.first_s = 0.0

    def step_ended(self) -> None:
        """To be called on each rank after each step."""
        self._steps += 1
        if self._steps == 1:
            self.first_s = time.monotonic()
        if self._killed and not self._again and self._steps == self._after:
            self._killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def figures(self) -> dict[str, float]:
        """When the first step had ended, and how long that was after a rank had died."""
        if self._killed and self._again:
            return {"kill_to_next_step_s": self.first_s - float(self._killed.read_text())}
        return {"first_step_at_s": self.first_s}


def figures_of(model: str, samples: int, seconds: float) -> dict[str, float]:
    """A model's figures in what a rank has found; the peak is that of all models so far."""
    return {
        f"{model} samples_per_s": samples / seconds,
        f"{model} peak_bytes": peak_resident_bytes(),
    }
