"""What the reports of ranks tell of a job, written into its folder about once a second."""

from __future__ import annotations

import statistics
from typing import Any

from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.launch.job_progress import JobProgress
from hvdtrain.launch.rank_pace import find_straggler

__all__ = ["ProgressRecord"]

INTERVAL_S = 1.0


class ProgressRecord:
    """Looks at the reports of one attempt, and says what is new in them."""

    def __init__(self, recorder: JobRecorder, reports: JobProgress) -> None:
        self._recorder = recorder
        self._reports = reports
        self._due_at = 0.0
        self._told: tuple[int | None, int | None] = (None, None)
        self._saved = reports.saved

    def review(self, now: float, *, last: bool = False) -> None:
        """Write what is new, if it is time for that, or if this is the ``last`` chance."""
        if now < self._due_at and not last:
            return
        self._due_at = now + INTERVAL_S
        reports = self._reports
        if reports.saved != self._saved:
            self._saved = reports.saved
            self._recorder.event("checkpoint", step=reports.saved)
            self._recorder.state(saved=reports.saved)
        if (told := (reports.step, reports.epoch)) == self._told:
            return
        self._told = told
        known: dict[str, Any] = {"step": reports.step, "epoch": reports.epoch}
        self._recorder.state(**known)
        own_s = reports.paces.of_late()
        if own_s:
            known |= {"own_s": round(statistics.median(own_s.values()), 6)}
        if (slow := find_straggler(own_s)) is not None:
            known |= {"slow": slow.rank, "slow_factor": round(slow.factor, 2)}
        for name, value in (("samples", reports.samples), ("loss", reports.loss)):
            if value is not None:
                known[name] = value
        self._recorder.metrics(**known)
