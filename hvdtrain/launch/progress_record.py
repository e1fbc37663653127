"""What the reports of ranks tell of a job, written into its folder about once a second."""

from __future__ import annotations

from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.launch.job_progress import JobProgress

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
        if (told := (reports.step, reports.epoch)) != self._told:
            self._told = told
            self._recorder.metrics(step=reports.step, epoch=reports.epoch)
            self._recorder.state(step=reports.step, epoch=reports.epoch)
