"""Measurements within a training, for all frameworks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from hvdtrain.bench.machine import peak_resident_bytes

__all__ = ["StepClock", "figures_of"]


class StepClock:
    """A recorder of the first step, which can also kill a rank.

    Args:
        rank: This rank.
        job: Parameters of the job. ``die`` selects a rank to kill: ``rank``, ``after_step``, and
            the ``file`` that passes the times of the first step and the kill to restarted
            processes.
    """

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        die = job.get("die")
        self._killed = Path(die["file"]) if die else None
        self._after = die["after_step"] if die and rank == die["rank"] else 0
        self._restarted = self._killed is not None and self._killed.exists()
        self._steps = 0
        self.first_s = 0.0

    def step_ended(self) -> None:
        """Count a step; call it after each step."""
        self._steps += 1
        if self._steps == 1:
            self.first_s = time.monotonic()
        if self._killed and not self._restarted and self._steps == self._after:
            self._killed.write_text(f"{self.first_s} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def figures(self) -> dict[str, float]:
        """Return the time of the job's first step, and the delay of the next one after a kill."""
        if self._killed and self._restarted:
            first_s, killed_s = map(float, self._killed.read_text().split())
            return {"first_step_at_s": first_s, "kill_to_next_step_s": self.first_s - killed_s}
        return {"first_step_at_s": self.first_s}


def figures_of(model: str, samples: int, seconds: float) -> dict[str, float]:
    """Return the figures of a model; the memory peak includes previous models."""
    return {
        f"{model} samples_per_s": samples / seconds,
        f"{model} peak_bytes": peak_resident_bytes(),
    }
